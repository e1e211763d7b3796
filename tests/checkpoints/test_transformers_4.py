"""Saved models compute the same outputs in Transformers 4 and in readers of its keys.

The slow test uses a Python with Transformers 4.57 and PyTorch from HFSEQ_TRANSFORMERS_4, or creates
one with pip.
"""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import transformers

import hfseq
from hfseq.checkpoints.config import write_config
from tests.support import models

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 3e4, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 2e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEFAULT = {"rope_type": "default", "rope_theta": 7e4}
LOCAL = {"rope_type": "default", "rope_theta": 300.0}
FULL, WINDOWED = "full_attention", "sliding_attention"

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}

#: PyTorch class, configuration, and the expected keys of Transformers 4.
ROTARY = {
    "llama": ("LlamaForCausalLM", HEADS, DEFAULT),
    "llama-llama3": ("LlamaForCausalLM", HEADS, LLAMA3),
    "llama-linear": ("LlamaForCausalLM", HEADS, LINEAR),
    "llama-dynamic": ("LlamaForCausalLM", HEADS | {"max_position_embeddings": 24}, DYNAMIC),
    "mistral": ("MistralForCausalLM", HEADS | {"sliding_window": 8}, DEFAULT),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}, DEFAULT),
    "qwen3-yarn": ("Qwen3ForCausalLM", HEADS, YARN),
    "gemma2": ("Gemma2ForCausalLM", HEADS | {"sliding_window": 8}, DEFAULT),
    "phi": ("PhiForCausalLM", {}, DEFAULT | {"partial_rotary_factor": 0.5}),
    "gemma3": (
        "Gemma3ForCausalLM",
        HEADS | {"sliding_window": 8, "layer_types": [WINDOWED, FULL] * 3},
        {FULL: LINEAR, WINDOWED: LOCAL},
    ),
    "gemma3-both-ways": (
        "Gemma3TextModel",
        HEADS
        | {
            "sliding_window": 8,
            "use_bidirectional_attention": True,
            "layer_types": [WINDOWED, FULL] * 3,
        },
        {FULL: DEFAULT, WINDOWED: LOCAL},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {"local_attention": 8, "layer_types": [FULL, WINDOWED] * 3},
        {FULL: DEFAULT, WINDOWED: LOCAL},
    ),
}
KEYS = {
    "llama": {"rope_theta": 7e4, "rope_scaling": None},
    "llama-llama3": {"rope_theta": 5e4, "rope_scaling": LLAMA3},
    "phi": {"rope_theta": 7e4, "partial_rotary_factor": 0.5},
    "gemma3": {"rope_theta": 3e4, "rope_local_base_freq": 300.0, "rope_scaling": LINEAR},
    "gemma3-both-ways": {"rope_theta": 7e4, "rope_scaling": None, "sliding_window": 8},
    "modernbert": {
        "global_rope_theta": 7e4,
        "local_rope_theta": 300.0,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
    },
}


def rotary_config(name):
    cls, sizes, rope = ROTARY[name]
    family = name.partition("-")[0]
    config = transformers.AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family,
        **{**SIZES, **sizes, "rope_parameters": json.loads(json.dumps(rope))},
    )
    config.architectures, config.dtype = [cls], "float32"
    return config


def written(config, folder):
    write_config(config, folder)
    return json.loads((folder / "config.json").read_bytes())


def test_failed_config_write_keeps_the_previous_file(tmp_path, monkeypatch):
    config = rotary_config("llama")
    previous = written(config, tmp_path)

    def full(self, text, **options):
        self.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    config.hidden_size *= 2
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            write_config(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_bytes()) == previous


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_are_written_for_both_generations(name, tmp_path):
    config = rotary_config(name)
    stored = written(config, tmp_path)
    expected_keys = KEYS.get(name, {"rope_theta": config.rope_parameters.get("rope_theta")})
    assert {key: stored[key] for key in expected_keys} == expected_keys
    assert (stored["dtype"], stored["torch_dtype"]) == ("float32", "float32")
    assert "rope_scaling" not in stored or "modernbert" not in name
    again = type(config).from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters == stored["rope_parameters"]
    assert written(again, tmp_path)["rope_parameters"] == stored["rope_parameters"]


@pytest.mark.parametrize("name", [name for name in ROTARY if "both-ways" not in name])
def test_rotary_positions_of_transformers_4_are_read(name, tmp_path):
    config = rotary_config(name)
    stored = written(config, tmp_path)
    del stored["rope_parameters"]
    if "modernbert" in name:
        del stored["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    read = type(config).from_pretrained(tmp_path)
    assert read.rope_parameters == config.rope_parameters
    assert getattr(read, "layer_types", None) == getattr(config, "layer_types", None)


def test_keys_follow_changes_after_loading(tmp_path):
    config = rotary_config("modernbert")
    written(config, tmp_path)
    config = type(config).from_pretrained(tmp_path)
    config.rope_parameters[WINDOWED]["rope_theta"] = 500.0
    assert written(config, tmp_path)["local_rope_theta"] == 500.0


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": [FULL, FULL, WINDOWED] * 2},
        {"rope_parameters": {FULL: LINEAR, WINDOWED: LOCAL}},
    ],
)
def test_options_that_transformers_4_lacks_cause_a_warning(change, tmp_path, caplog):
    config = rotary_config("modernbert")
    config.update(change)
    stored = written(config, tmp_path)
    assert "global_rope_theta" not in stored and "global_attn_every_n_layers" not in stored
    assert "config.json of this modernbert has no keys for Transformers 4" in caplog.text


def test_a_decoder_of_two_bases_is_one_of_a_single_base_in_transformers_4(tmp_path, caplog):
    # Transformers 4 computes both rotary tables from the first rope_theta.
    sizes = SIZES | {"local_attention": 8, "layer_types": [FULL, WINDOWED] * 3}
    config = transformers.AutoConfig.for_model("modernbert-decoder", **sizes)
    config.rope_parameters = {FULL: DEFAULT, WINDOWED: DEFAULT}
    assert written(config, tmp_path)["local_rope_theta"] == DEFAULT["rope_theta"]
    assert "no keys for Transformers 4" not in caplog.text
    config.rope_parameters = {FULL: DEFAULT, WINDOWED: LOCAL}
    assert "local_rope_theta" not in written(config, tmp_path)
    assert "config.json of this modernbert-decoder has no keys for Transformers 4" in caplog.text


def test_nested_configurations_get_their_keys(tmp_path):
    text = rotary_config("gemma3").to_dict()
    stored = written(transformers.Gemma3Config(text_config=text), tmp_path)
    assert stored["text_config"]["rope_local_base_freq"] == 300.0
    assert stored["text_config"]["torch_dtype"] == "float32"


# -- the same weights in Transformers 4


READ = """
import sys, warnings
from pathlib import Path
import numpy as np, torch, transformers
assert transformers.__version__.startswith("4.57"), transformers.__version__
for folder in map(Path, sys.argv[1:]):
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True)
    unfit = {name: left for name, left in info.items() if left}
    assert not unfit, (folder, unfit)
    inputs = {k: torch.from_numpy(v) for k, v in np.load(folder / "inputs.npz").items()}
    with torch.no_grad():
        output = model.eval()(**inputs)
    np.save(folder / "v4.npy", (output.logits if "logits" in output else output[0]).numpy())
"""


def in_tree():
    """A model of each family that has a PyTorch class or a stock architecture."""
    from hfseq_plugins.bart.modeling import FlaxBartForConditionalGeneration
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
    from hfseq_plugins.fp8_encoder.modeling import FlaxFp8EncoderForMaskedLM
    from hfseq_plugins.gpt2.modeling import FlaxGPT2LMHeadModel
    from hfseq_plugins.marian.modeling import FlaxMarianMTModel
    from hfseq_plugins.megatron_bert.modeling import FlaxMegatronBertForMaskedLM
    from hfseq_plugins.pegasus.modeling import FlaxPegasusForConditionalGeneration
    from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM
    from hfseq_plugins.t5.modeling import FlaxT5ForConditionalGeneration
    from hfseq_plugins.wmt_transformer.modeling import FlaxWMTTransformerForConditionalGeneration

    yield "bert", FlaxBertForMaskedLM(models.bert_config())
    yield "roberta", FlaxRobertaForMaskedLM(models.roberta_config())
    yield "gpt2", FlaxGPT2LMHeadModel(models.gpt2_config())
    yield "t5", FlaxT5ForConditionalGeneration(models.t5_config())
    yield "bart", FlaxBartForConditionalGeneration(models.bart_config())
    yield "marian", FlaxMarianMTModel(models.marian_config())
    yield "pegasus", FlaxPegasusForConditionalGeneration(models.pegasus_config())
    yield "megatron_bert", FlaxMegatronBertForMaskedLM(models.megatron_bert_config())
    yield "fp8_encoder", FlaxFp8EncoderForMaskedLM(models.fp8_encoder_config())
    config = models.wmt_transformer_config()
    yield "wmt_transformer", FlaxWMTTransformerForConditionalGeneration(config)


def example():
    """The Llama example of the documentation, for each type of rotary embeddings."""
    from hfseq_llama import FlaxLlamaForCausalLM  # type: ignore[import-not-found]

    yield "example", FlaxLlamaForCausalLM(rotary_config("llama"))


SHELF = Path(__file__).parents[1] / "plugins" / "v4_files"


def save_shelf(root):
    """The families of Transformers 4's Flax classes, from files that these classes wrote."""
    from safetensors.numpy import load_file

    for source in sorted(path.parent for path in SHELF.glob("*/config.json")):
        (class_name,) = json.loads((source / "config.json").read_bytes())["architectures"]
        model = getattr(hfseq, f"Flax{class_name}").from_pretrained(source)
        folder = root / source.name
        model.save_pretrained(folder)
        arrays = {
            name.removeprefix("input."): value
            for name, value in load_file(source / "numbers.safetensors").items()
            if name.startswith("input.")
        }
        np.savez(folder / "inputs.npz", **arrays)
        output = model(**arrays)
        np.save(folder / "expected.npy", np.asarray(output.get("logits", output[0])))


def save_ours(named_models, root):
    inputs = {"input_ids": models.ids(), "attention_mask": np.ones((2, 12), np.int64)}
    inputs["attention_mask"][1, 9:] = 0
    for name, model in named_models:
        folder = root / name
        model.save_pretrained(folder)
        arrays = {key: np.asarray(value, np.int64) for key, value in inputs.items()}
        if model.config.is_encoder_decoder:
            arrays["decoder_input_ids"] = arrays["input_ids"][:, ::-1].copy()
        np.savez(folder / "inputs.npz", **arrays)
        np.save(folder / "expected.npy", np.asarray(model(**arrays).logits))


def save_stock(root):
    """Models with a configuration from hfseq's hook and weights from PyTorch."""
    import torch

    ids = np.random.default_rng(0).integers(3, 64, (2, 40))
    mask = np.ones_like(ids)
    mask[1, 33:] = 0
    for name in ROTARY:
        config = rotary_config(name)
        torch.manual_seed(0)
        cls = getattr(transformers, config.architectures[0])
        model = cls._from_config(config, attn_implementation="eager").eval()
        model.save_pretrained(root / name)
        write_config(config, root / name)
        again = cls.from_pretrained(root / name, attn_implementation="eager").eval()
        inputs = {"input_ids": ids, "attention_mask": mask}
        np.savez(root / name / "inputs.npz", **inputs)
        arrays = {key: torch.from_numpy(value) for key, value in inputs.items()}
        with torch.no_grad():
            outputs = [loaded(**arrays) for loaded in (model, again)]
        first, second = ((o.logits if "logits" in o else o[0]).numpy() for o in outputs)
        assert np.array_equal(first, second), name
        np.save(root / name / "expected.npy", first)


@pytest.mark.slow
def test_logits_match_in_transformers_4(python_4, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    example_folder = Path(__file__).parents[2] / "docs" / "examples" / "hfseq-llama"
    monkeypatch.syspath_prepend(str(example_folder))
    save_ours(in_tree(), tmp_path)
    save_ours(example(), tmp_path)
    save_shelf(tmp_path / "shelf")
    save_stock(tmp_path)
    folders = sorted(path.parent for path in tmp_path.rglob("expected.npy"))
    subprocess.run([python_4, "-c", READ, *folders], check=True)
    differences = {}
    for folder in folders:
        expected, arrays = np.load(folder / "expected.npy"), np.load(folder / "v4.npy")
        mask = np.load(folder / "inputs.npz").get("attention_mask")
        by_token = mask is not None and expected.shape[:2] == mask.shape and expected.ndim > 2
        by_token &= "decoder_input_ids" not in np.load(folder / "inputs.npz")
        visible = mask[..., None] == 1 if by_token else 1
        differences[folder.name] = float(np.abs((expected - arrays) * visible).max())
    assert {name: far for name, far in differences.items() if not far < 1e-4} == {}
