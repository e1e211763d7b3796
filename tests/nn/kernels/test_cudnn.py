"""cuDNN's attention: unsupported calls, and the runs of packed rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.kernels import cudnn

SPEC = AttentionSpec("cuda", 8, 512, 512, 12, 12, 64, "bfloat16", capability=(9, 0))


@pytest.mark.parametrize(
    "unsupported_reason",
    [cudnn.unsupported_reason, cudnn.packed_unsupported_reason, cudnn.mask_unsupported_reason],
)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "NVIDIA"),
        ({"dropout": 0.1}, "not a function of seed, step and row"),
        ({"dtype": "float32"}, "half types"),
        ({"head_dim": 65}, "multiple of 8"),
        ({"head_dim": 264}, "up to 256"),
        ({"head_dim": 192, "capability": (8, 0)}, "up to 128|9.0"),
        ({"capability": (7, 5)}, "8.0|9.0"),
        ({"causal": True, "keys": 256}, "as many queries"),
        ({"mesh": (("sequence", 2),)}, "splits sequences"),
        ({"mesh": (("tensor", 8),)}, "does not divide"),
    ],
)
def test_calls_that_no_variant_supports_are_refused_with_the_reason(
    unsupported_reason, changes, reason
):
    packed = unsupported_reason is cudnn.packed_unsupported_reason
    spec = dataclasses.replace(SPEC, segments="same", max_runs=8) if packed else SPEC
    assert unsupported_reason(spec) is None
    actual = unsupported_reason(dataclasses.replace(spec, **changes))
    assert actual is not None and any(part in actual for part in reason.split("|")), actual


@pytest.mark.parametrize(
    ("unsupported_reason", "changes", "reason"),
    [
        (cudnn.unsupported_reason, {"segments": "keys"}, "lengths only"),
        (cudnn.unsupported_reason, {"mask": (8, 1, 1, 512)}, "cudnn_bias"),
        (cudnn.unsupported_reason, {"window": (64, 64)}, "causal"),
        (
            cudnn.unsupported_reason,
            {"window": (64, 0), "causal": True, "lengths": True},
            "window together with lengths",
        ),
        (cudnn.packed_unsupported_reason, {"segments": "keys", "max_runs": 8}, "packed"),
        (cudnn.packed_unsupported_reason, {"segments": "same"}, "documents per row is unknown"),
        (
            cudnn.packed_unsupported_reason,
            {"segments": "same", "max_runs": 99, "memory": 1e8},
            "10% of the memory",
        ),
        (
            cudnn.packed_unsupported_reason,
            {"segments": "same", "max_runs": 8, "capability": (8, 0)},
            "9.0 or higher",
        ),
        (cudnn.bias_unsupported_reason, {}, "neither a bias nor"),
        (
            cudnn.bias_unsupported_reason,
            {"bias": (1, 12, 512, 512), "segments": "same"},
            "become a mask",
        ),
        (cudnn.mask_unsupported_reason, {"queries": 511, "keys": 511}, "even"),
        (
            cudnn.mask_unsupported_reason,
            {"window": (64, 0), "causal": True},
            "does not support a window",
        ),
    ],
)
def test_each_variant_refuses_unsupported_calls_with_the_reason(
    unsupported_reason, changes, reason
):
    actual = unsupported_reason(dataclasses.replace(SPEC, **changes))
    assert actual is not None and reason in actual, actual


@pytest.mark.parametrize("seed", range(3))
def test_runs_equal_the_dense_mask_of_the_segments(seed):
    random = np.random.default_rng(seed)
    segments = np.zeros((4, 30), np.int32)
    for row in segments:
        ends = np.sort(random.integers(1, 30, 3))
        row[: ends[-1]] = 1 + (np.arange(ends[-1])[:, None] >= ends[None, :-1]).sum(1)
    lengths, offsets = map(np.asarray, cudnn.run_offsets(jnp.asarray(segments), 6))
    assert lengths.shape == (4, 6) and offsets.shape == (4, 7)
    for row, row_lengths, row_offsets in zip(segments, lengths, offsets, strict=True):
        mask = np.zeros((30, 30), bool)
        for length, start in zip(row_lengths, row_offsets, strict=False):
            if length > 0:
                mask[start : start + length, start : start + length] = True
        np.testing.assert_array_equal(mask, row[:, None] == row[None])
        runs = (row_lengths > 0).sum()
        assert (row_lengths[runs:] == -1).all()
        assert (row_offsets[runs + 1 :] == -1).all() and row_offsets[runs] == 30
