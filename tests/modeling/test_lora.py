"""Adapters beside PEFT's: the same numbers, the same files, both ways."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfseq
from hfseq.errors import CheckpointError, UsageError, WeightsError
from hfseq.modeling.lora import LoraConfig
from hfseq.nn import trees
from tests.support import models

# What PEFT 0.21 asks of Transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
#: Family, head, and PEFT's configuration.
CASES = {
    "gpt2": ("gpt2", "CausalLM", {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}),
    "classes": ("bert", "SequenceClassification", {"r": 2, "lora_alpha": 3}),
    "all-linear": (
        "llama", "CausalLM", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    ),
    "ranks": (
        "llama", "CausalLM",
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"],
         "rank_pattern": {"down_proj": 4}, "alpha_pattern": {r"layers.1.self_attn.q_proj": 2},
         "use_rslora": True},
    ),
    "words": (
        "roberta", "MaskedLM",
        {"r": 2, "lora_alpha": 2, "target_modules": ["word_embeddings", "query", "dense"],
         "exclude_modules": ["lm_head.dense"], "bias": "lora_only"},
    ),
    "layers": (
        "bart", "Seq2SeqLM",
        {"r": 2, "lora_alpha": 2, "target_modules": ["k_proj"], "layers_to_transform": [1],
         "layers_pattern": ["layers"], "bias": "all"},
    ),
}  # fmt: skip


def close(found, right, relative=1e-5):
    found, right = np.asarray(found), np.asarray(right)
    assert np.abs(found - right).max() <= relative * max(1, np.abs(right).max())


def base(name, folder):
    """A saved model of random weights, and inputs."""
    family, head, _ = CASES[name]
    config = getattr(models, f"{family}_config")()
    kind = getattr(hfseq, f"FlaxAutoModelFor{head}")
    model = kind.from_config(config)
    model.save_pretrained(folder)
    given = {"input_ids": models.ids(2, 9)}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"][:, ::-1].copy()
    return kind, given


def peft_model(name, folder):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    import transformers

    _, head, options = CASES[name]
    tasks = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS",
             "Seq2SeqLM": "SEQ_2_SEQ_LM"}  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder)
    made = peft.LoraConfig(task_type=tasks.get(head), **options)
    adapted = peft.get_peft_model(model, made)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:  # away from zero
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return adapted.eval()


def logits_of(model, given):
    import torch

    with torch.no_grad():
        return model(**{key: torch.from_numpy(value) for key, value in given.items()}).logits


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_loads_and_goes_back(name, tmp_path):
    pytest.importorskip("peft")
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM  # noqa: F401  (its Auto classes)

    kind, given = base(name, tmp_path / "base")
    theirs = peft_model(name, tmp_path / "base")
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    right = logits_of(theirs, given)
    model = kind.from_pretrained(tmp_path / "theirs")
    close(model(**given).logits, right)
    if name == "words":
        with pytest.raises(UsageError, match="is the head's, too"):
            model.merge_adapter()
    else:
        close(model.merge_adapter()(**given).logits, right, 3e-5)
    model.save_pretrained(tmp_path / "ours")
    files = [load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "ours")]
    assert {key: array.shape for key, array in files[0].items()} == {
        key: array.shape for key, array in files[1].items()
    }
    assert all(np.array_equal(files[1][key], array) for key, array in files[0].items())
    ground = type(theirs.get_base_model()).from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(ground, tmp_path / "ours").eval()
    close(logits_of(again, given), right)
    if name not in ("layers", "ranks"):  # whose layers differ
        scanned = kind.from_pretrained(tmp_path / "ours", scan_layers=True)
        close(scanned(**given).logits, right)
        if name != "words":
            close(scanned.merge_adapter()(**given).logits, right, 3e-5)
