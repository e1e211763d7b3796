"""cuDNN's attention: what it refuses, and the runs of packed rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.kernels import cudnn

FACTS = AttentionSpec("cuda", 8, 512, 512, 12, 12, 64, "bfloat16", capability=(9, 0))


@pytest.mark.parametrize(
    "refuses",
    [cudnn.unsupported_reason, cudnn.packed_unsupported_reason, cudnn.mask_unsupported_reason],
)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"platform": "tpu"}, "NVIDIA"),
        ({"dropout": 0.1}, "no function of seed, step and row"),
        ({"dtype": "float32"}, "half types"),
        ({"head_dim": 65}, "multiple of 8"),
        ({"head_dim": 264}, "up to 256"),
        ({"head_dim": 192, "capability": (8, 0)}, "up to 128|9.0"),
        ({"capability": (7, 5)}, "8.0|9.0"),
        ({"causal": True, "keys": 256}, "as many queries"),
        ({"mesh": (("sequence", 2),)}, "cuts sequences"),
        ({"mesh": (("tensor", 8),)}, "does not divide"),
    ],
)
def test_what_no_form_serves_is_refused_with_the_reason(refuses, changes, why):
    packed = (
        {"segments": "same", "max_runs": 8} if refuses is cudnn.packed_unsupported_reason else {}
    )
    facts = dataclasses.replace(FACTS, **packed)
    assert refuses(facts) is None
    told = refuses(dataclasses.replace(facts, **changes))
    assert told is not None and any(part in told for part in why.split("|")), told


@pytest.mark.parametrize(
    ("refuses", "changes", "why"),
    [
        (cudnn.unsupported_reason, {"segments": "keys"}, "lengths only"),
        (cudnn.unsupported_reason, {"mask": (8, 1, 1, 512)}, "cudnn_bias"),
        (cudnn.unsupported_reason, {"window": (64, 64)}, "causal"),
        (
            cudnn.unsupported_reason,
            {"window": (64, 0), "causal": True, "lengths": True},
            "beside lengths",
        ),
        (cudnn.packed_unsupported_reason, {"segments": "keys", "max_runs": 8}, "packed"),
        (cudnn.packed_unsupported_reason, {"segments": "same"}, "nobody counted"),
        (
            cudnn.packed_unsupported_reason,
            {"segments": "same", "max_runs": 99, "memory": 1e8},
            "10% of the memory",
        ),
        (
            cudnn.packed_unsupported_reason,
            {"segments": "same", "max_runs": 8, "capability": (8, 0)},
            "9.0 or more",
        ),
        (cudnn.bias_unsupported_reason, {}, "neither"),
        (
            cudnn.bias_unsupported_reason,
            {"bias": (1, 12, 512, 512), "segments": "same"},
            "as a mask",
        ),
        (cudnn.mask_unsupported_reason, {"queries": 511, "keys": 511}, "even"),
        (cudnn.mask_unsupported_reason, {"window": (64, 0), "causal": True}, "no window"),
    ],
)
def test_each_form_says_what_it_is_not_for(refuses, changes, why):
    told = refuses(dataclasses.replace(FACTS, **changes))
    assert told is not None and why in told, told


@pytest.mark.parametrize("seed", range(3))
def test_runs_are_the_dense_mask_of_the_segments(seed):
    random = np.random.default_rng(seed)
    segments = np.zeros((4, 30), np.int32)
    for row in segments:
        ends = np.sort(random.integers(1, 30, 3))
        row[: ends[-1]] = 1 + (np.arange(ends[-1])[:, None] >= ends[None, :-1]).sum(1)
    lengths, offsets = map(np.asarray, cudnn.run_offsets(jnp.asarray(segments), 6))
    assert lengths.shape == (4, 6) and offsets.shape == (4, 7)
    for row, own, at in zip(segments, lengths, offsets, strict=True):
        mask = np.zeros((30, 30), bool)
        for length, start in zip(own, at, strict=False):
            if length > 0:
                mask[start : start + length, start : start + length] = True
        np.testing.assert_array_equal(mask, row[:, None] == row[None])
        used = (own > 0).sum()
        assert (own[used:] == -1).all() and (at[used + 1 :] == -1).all() and at[used] == 30
