"""Generation from directories whose files contradict each other or extend the positions."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hfseq

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def save(folder, **sizes):
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SIZES | sizes)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)


def change(folder, name, **values):
    path = folder / name
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stored | values))


def both(folder, ids, **options):
    """Returns the greedy tokens of PyTorch and of hfseq."""
    reference = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = reference.generate(torch.tensor(ids), do_sample=False, **options).numpy()
    actual = hfseq.FlaxLlamaForCausalLM.from_pretrained(folder).generate(ids, **options).sequences
    return expected, np.asarray(actual)[:, : expected.shape[1]]


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        pytest.param({"rope_type": "linear", "factor": 2.0}, 64, marks=pytest.mark.slow),
        pytest.param(
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
            32,
            marks=pytest.mark.slow,
        ),
        (None, 32),
    ],
)
def test_rotary_models_generate_beyond_their_positions(tmp_path, scaling, length, caplog):
    save(tmp_path, max_position_embeddings=32)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["rope_parameters"]
    stored |= {"rope_theta": 1e4, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    ids = np.random.default_rng(1).integers(5, 99, (1, 40))
    expected, actual = both(tmp_path, ids, max_new_tokens=30)
    assert (actual == expected).all()
    model = hfseq.FlaxLlamaForCausalLM.from_pretrained(tmp_path)
    assert model.max_length() == length and model.position_limit() is None
    caplog.clear()
    from hfseq.generation import request

    request._warn_about_length.cache_clear()
    model.generate(ids, max_new_tokens=30)
    assert (f"may become longer than {length} tokens" in caplog.text) == (length < 70)


@pytest.mark.parametrize("derived", [True, False, None])
def test_generation_config_takes_precedence_over_config(tmp_path, derived, caplog):
    save(tmp_path)
    ids = np.random.default_rng(1).integers(5, 99, (2, 9))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    free = model.generate(torch.tensor(ids), max_new_tokens=8, do_sample=False, eos_token_id=None)
    end = int(free[0, 12])
    change(tmp_path, "config.json", eos_token_id=98, pad_token_id=3)
    options = {"eos_token_id": end, "pad_token_id": 0, "bos_token_id": 1}
    options |= {} if derived is None else {"_from_model_config": derived}
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    expected, actual = both(tmp_path, ids, max_new_tokens=8)
    assert (expected == end).any() and (actual == expected).all()
    assert "modified the pretrained model configuration" not in caplog.text
