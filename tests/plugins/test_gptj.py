"""GPT-J: the battery, partial rotary embeddings, the head with a bias, generation."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.gptj.modeling import FlaxGPTJForCausalLM
from tests.support.models import close, fewest_layers, gptj_config, ids
from tests.support.parity import compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import torch_counterpart


@pytest.mark.parametrize(("head", "checks"), battery("gptj", "ForCausalLM"))
def test_battery(head, checks):
    layers = fewest_layers("gptj") if checks else {}
    check_architecture("gptj", gptj_config(**layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"n_inner": 20, "activation_function": "relu"},
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        {"rotary_dim": 16},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_battery_of_an_option(changes):
    check_architecture("gptj", gptj_config(**changes), heads=["ForCausalLM"])


def test_tied_head_has_only_a_bias():
    tied = FlaxGPTJForCausalLM(gptj_config(tie_word_embeddings=True, n_layer=1), _do_init=False)
    assert {p for p in tied.required_params if p[0] == "lm_head"} == {("lm_head", "bias")}


@pytest.mark.slow
def test_buffers_of_old_files_are_ignored(tmp_path, caplog):
    from safetensors.numpy import load_file, save_file

    model = FlaxGPTJForCausalLM(gptj_config(), seed=1)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("bias", "masked_bias", "embed_positions"):
        stored[f"transformer.h.0.attn.{name}"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = FlaxGPTJForCausalLM.from_pretrained(tmp_path)
    assert close(again(ids(1, 6)).logits, model(ids(1, 6)).logits)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_tokens_are_pytorchs(search, tmp_path):
    model = FlaxGPTJForCausalLM(gptj_config(), seed=1)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int32)
    mask[0, :4] = 0
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, tokens, mask, max_new_tokens=14, do_sample=False, **search)
