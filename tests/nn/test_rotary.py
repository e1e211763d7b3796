"""Rotary positions of every kind are those of PyTorch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.positions import ROPE_TYPES, rope_parameters

HEAD, LONGEST = 16, 64
FACTORS = {
    "long_factor": [2.0 + k / 3 for k in range(8)],
    "short_factor": [1.0 + k / 9 for k in range(8)],
}
KINDS = {
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


def config(kind, **changes):
    name = kind.partition(" ")[0]
    rope = {"rope_type": name if name in ROPE_TYPES else "default", "rope_theta": 500.0}
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        rope_parameters=rope | KINDS[kind] | changes,
    )


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_turned_heads_are_those_of_pytorch(kind, length):
    torch = pytest.importorskip("torch")
    from transformers.models.llama import modeling_llama as theirs
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    given = config(kind)
    table = PhiRotaryEmbedding if kind == "partial" else theirs.LlamaRotaryEmbedding
    positions = np.stack([np.arange(length), np.arange(length)[::-1]])
    x = np.random.default_rng(0).normal(size=(2, length, 3, HEAD)).astype(np.float32)
    found = nn.rotate(jnp.asarray(x), nn.Rotary(given, HEAD)(jnp.asarray(positions)))
    states = torch.from_numpy(x).transpose(1, 2)
    cos, sin = table(given)(states, torch.from_numpy(positions.copy()))
    width = cos.shape[-1]
    right, _ = theirs.apply_rotary_pos_emb(states[..., :width], states[..., :width], cos, sin)
    right = torch.cat([right, states[..., width:]], -1).transpose(1, 2)
    assert np.abs(found - right.numpy()).max() < 2e-5


def test_neighbours_turn_together_in_the_interleaved_form():
    torch = pytest.importorskip("torch")
    from transformers.models.gptj import modeling_gptj as theirs

    x = np.random.default_rng(0).normal(size=(1, 9, 2, HEAD)).astype(np.float32)
    angles = nn.Rotary(config("default", rope_theta=10000.0), HEAD)(jnp.arange(9)[None])
    table = theirs.create_sinusoidal_positions(9, HEAD)
    sin, cos = torch.split(table[None], HEAD // 2, dim=-1)
    right = theirs.apply_rotary_pos_emb(torch.from_numpy(x), sin, cos)
    assert np.abs(nn.rotate(jnp.asarray(x), angles, interleaved=True) - right.numpy()).max() < 1e-5


def test_angles_are_computed_in_float32_and_the_type_stays():
    x = jnp.ones((1, 3000, 1, HEAD), jnp.bfloat16)
    angles = nn.Rotary(config("default"), HEAD)(jnp.arange(3000)[None])
    turned = nn.rotate(x, angles)
    assert turned.dtype == jnp.bfloat16 and angles[0].dtype == jnp.float32
    exact = nn.rotate(x.astype(jnp.float32), angles)
    assert np.abs(turned.astype(jnp.float32) - exact).max() < 2**-7


def test_version_4_spells_the_same_otherwise():
    class Old:
        max_position_embeddings, rope_theta = 64, 500.0
        rope_scaling = {"type": "linear", "factor": 4.0}

    old, new = rope_parameters(Old()), rope_parameters(config("linear"))
    assert {k: old[k] for k in ("rope_type", "rope_theta", "factor")} == new


def test_an_unknown_kind_and_what_a_kind_lacks_are_named():
    given = config("default")
    given.rope_parameters = {"rope_type": "yarm", "rope_theta": 1e4}
    with pytest.raises(UsageError, match=r"rope_type 'yarm'.*did you mean 'yarn'.*known: default"):
        nn.Rotary(given, HEAD)
    for kind in ("linear", "dynamic", "llama3", "yarn"):
        given.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
        with pytest.raises(UsageError, match=f"'{kind}' needs (factor|low_freq_factor)"):
            nn.Rotary(given, HEAD)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("longrope", {"short_factor": [1.0] * 7}, "give no angles: operands"),
        ("longrope", {"long_factor": [0.0] * 8}, "give 8 frequencies"),
        ("linear", {"factor": "four"}, "give no angles"),
        ("linear", {"factor": 0}, "give 8 frequencies.*inf"),
        ("yarn", {"rope_theta": 1}, "give no angles: .*division"),
        ("partial", {"partial_rotary_factor": 0.45}, "give 4 frequencies for 7 numbers"),
    ],
)
def test_parameters_that_give_no_angles_are_told(kind, changes, told):
    given = config("default")
    name = kind if kind in ROPE_TYPES else "default"
    given.rope_parameters = {"rope_type": name, "rope_theta": 1e4, **KINDS[kind], **changes}
    with pytest.raises(UsageError, match=f"rope_parameters {{'rope_type': '{name}'.*{told}"):
        nn.Rotary(given, HEAD)
