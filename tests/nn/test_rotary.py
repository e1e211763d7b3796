"""Rotary position embeddings of every type equal those of PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.positions import ROPE_TYPES, rope_parameters

HEAD, MAX_POSITIONS = 16, 64
FACTORS = {
    "long_factor": [2.0 + k / 3 for k in range(8)],
    "short_factor": [1.0 + k / 9 for k in range(8)],
}
ROPE_CASES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with magnitudes": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
        "beta_fast": 8,
    },
    "longrope": {"original_max_position_embeddings": 24, **FACTORS},
    "partial": {"partial_rotary_factor": 0.5},
}


def config(case, **changes):
    name = case.partition(" ")[0]
    rope = {"rope_type": name if name in ROPE_TYPES else "default", "rope_theta": 500.0}
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=rope | ROPE_CASES[case] | changes,
    )


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("case", ROPE_CASES)
def test_rotated_heads_equal_pytorch(case, length):
    torch = pytest.importorskip("torch")
    from transformers.models.llama import modeling_llama as theirs
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    llama_config = config(case)
    table = PhiRotaryEmbedding if case == "partial" else theirs.LlamaRotaryEmbedding
    positions = np.stack([np.arange(length), np.arange(length)[::-1]])
    x = np.random.default_rng(0).normal(size=(2, length, 3, HEAD)).astype(np.float32)
    width = HEAD // 2 if case == "partial" else HEAD
    rotate = jax.jit(lambda x, positions: nn.rotate(x, nn.Rotary(llama_config, width)(positions)))
    rotated = rotate(x, positions)
    states = torch.from_numpy(x).transpose(1, 2)
    cos, sin = table(llama_config)(states, torch.from_numpy(positions.copy()))
    width = cos.shape[-1]
    right, _ = theirs.apply_rotary_pos_emb(states[..., :width], states[..., :width], cos, sin)
    right = torch.cat([right, states[..., width:]], -1).transpose(1, 2)
    assert np.abs(rotated - right.numpy()).max() < 2e-5


def test_interleaved_rotation_equals_pytorch():
    torch = pytest.importorskip("torch")
    from transformers.models.gptj import modeling_gptj as theirs

    x = np.random.default_rng(0).normal(size=(1, 9, 2, HEAD)).astype(np.float32)
    angles = nn.Rotary(config("default", rope_theta=10000.0), HEAD)(jnp.arange(9)[None])
    table = theirs.create_sinusoidal_positions(9, HEAD)
    sin, cos = torch.split(table[None], HEAD // 2, dim=-1)
    right = theirs.apply_rotary_pos_emb(torch.from_numpy(x), sin, cos)
    assert np.abs(nn.rotate(jnp.asarray(x), angles, interleaved=True) - right.numpy()).max() < 1e-5


def test_angles_are_float32_and_the_dtype_is_kept():
    x = jnp.ones((1, 3000, 1, HEAD), jnp.bfloat16)
    angles = nn.Rotary(config("default"), HEAD)(jnp.arange(3000)[None])
    rotated = nn.rotate(x, angles)
    assert rotated.dtype == jnp.bfloat16 and angles[0].dtype == jnp.float32
    exact = nn.rotate(x.astype(jnp.float32), angles)
    assert np.abs(rotated.astype(jnp.float32) - exact).max() < 2**-7


def test_transformers_4_parameters_are_converted():
    class Old:
        max_position_embeddings, rope_theta = 64, 500.0
        rope_scaling = {"type": "linear", "factor": 4.0}

    old, new = rope_parameters(Old()), rope_parameters(config("linear"))
    assert {k: old[k] for k in ("rope_type", "rope_theta", "factor")} == new


def test_unknown_types_and_missing_parameters_are_errors():
    llama_config = config("default")
    llama_config.rope_parameters = {"rope_type": "yarm", "rope_theta": 1e4}
    with pytest.raises(UsageError, match=r"rope_type 'yarm'.*did you mean 'yarn'.*known: default"):
        nn.Rotary(llama_config, HEAD)
    for rope_type in ("linear", "dynamic", "llama3", "yarn"):
        llama_config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
        with pytest.raises(UsageError, match=f"'{rope_type}' needs (factor|low_freq_factor)"):
            nn.Rotary(llama_config, HEAD)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("longrope", {"short_factor": [1.0] * 7}, "are invalid: operands"),
        ("longrope", {"long_factor": [0.0] * 8}, "needs 8 finite frequencies"),
        ("linear", {"factor": "four"}, "are invalid"),
        ("linear", {"factor": 0}, "inf.*needs 8 finite frequencies"),
        ("yarn", {"rope_theta": 1}, "are invalid: .*division"),
    ],
)
def test_invalid_parameters_are_an_error(case, changes, message):
    llama_config = config("default")
    name = case if case in ROPE_TYPES else "default"
    llama_config.rope_parameters = {
        "rope_type": name,
        "rope_theta": 1e4,
        **ROPE_CASES[case],
        **changes,
    }
    with pytest.raises(UsageError, match=f"rope_parameters {{'rope_type': '{name}'.*{message}"):
        nn.Rotary(llama_config, HEAD)
