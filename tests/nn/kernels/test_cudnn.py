"""cuDNN's attention: unsupported calls, and the runs of packed rows."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from hfseq.nn.attention import attention_spec, explicit_attention
from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.kernels import cudnn
from hfseq.nn.visible import Visibility

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
        ({"dtype": "float32"}, "bfloat16"),
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
    run_offsets = jax.jit(cudnn.run_offsets, static_argnums=1)
    lengths, offsets = map(np.asarray, run_offsets(jnp.asarray(segments), 6))
    assert lengths.shape == (4, 6) and offsets.shape == (4, 7)
    for row, row_lengths, row_offsets in zip(segments, lengths, offsets, strict=True):
        mask = np.zeros((30, 30), bool)
        for length, start in zip(row_lengths, row_offsets, strict=False):
            if length > 0:
                mask[start : start + length, start : start + length] = True
        np.testing.assert_array_equal(mask, row[:, None] == row[None])
        runs = (row_lengths > 0).sum()
        assert (row_lengths[runs:] == -1).all()
        assert (row_offsets[runs:] == -1).all()


@pytest.mark.parametrize("runs", [[[3, 9, 12], [0, 5]], [[], [4, 8, 20]], [[7], [1, 2, 3]]])
def test_each_run_keeps_its_start_when_jax_joins_the_runs_of_all_rows(runs):
    segments = np.stack([np.isin(np.arange(24), starts).cumsum() for starts in runs])
    query = jnp.zeros((2, 24, 4, 8), jnp.bfloat16)

    @jax.jit
    def join(segments):
        lengths, offsets = cudnn.run_offsets(segments, 5)
        return fused_attention_stablehlo._fix_seqlen_offsets(
            lengths, lengths, offsets, offsets, query, query
        )

    joined_lengths, _, joined_offsets, _ = join(jnp.asarray(segments))
    expected = [
        (row * 24 + start, end - start)
        for row, starts in enumerate(runs)
        for start, end in itertools.pairwise(sorted({0, *starts, 24}))
    ]
    starts = np.asarray(joined_offsets).ravel() // (4 * 8)
    actual = zip(starts.tolist(), np.asarray(joined_lengths).ravel().tolist(), strict=False)
    assert [(start, length) for start, length in actual if length > 0] == expected


def test_padding_keys_get_no_gradient_although_the_kernel_leaves_their_memory_as_it_is(
    monkeypatch,
):
    @jax.custom_vjp
    def kernel(query, key, value):
        return value

    def backward(_, gradient):
        return gradient, jnp.full_like(gradient, jnp.nan), jnp.full_like(gradient, jnp.nan)

    kernel.defvjp(lambda *arrays: (arrays[2], None), backward)
    monkeypatch.setattr(
        fused_attention_stablehlo,
        "dot_product_attention",
        lambda query, key, value, *args, **kwargs: kernel(query, key, value),
    )
    lengths = jnp.asarray([4, 0, 6])

    def attend(key, value):
        visible = Visibility(key_lengths=lengths)
        return cudnn.cudnn_attention(AttentionCall(key, key, value, visible, 1.0)).sum()

    arrays = [jnp.ones((3, 6, 2, 8), jnp.bfloat16)] * 2
    for gradient in jax.grad(attend, argnums=(0, 1))(*arrays):
        written = np.isnan(np.asarray(gradient, np.float32)).any((2, 3))
        np.testing.assert_array_equal(written, np.arange(6) < np.asarray(lengths)[:, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, [7, 3]])
def test_odd_lengths_reach_the_kernel_as_even_ones(monkeypatch, causal, lengths):
    """jax raises an error in the backward pass for odd lengths, for example for 197 patches."""

    def kernel(query, key, value, bias, mask, *, mask_type, q_seqlen=None, kv_seqlen=None, **_):
        assert query.shape[1] % 2 == key.shape[1] % 2 == 0
        seen = jnp.ones((len(query), query.shape[1], key.shape[1]), bool)
        if "CAUSAL" in mask_type.name:
            seen = jnp.tril(seen)
        if "PADDING" in mask_type.name:
            seen &= jnp.arange(key.shape[1]) < kv_seqlen[:, None, None]
            written = jnp.arange(query.shape[1]) < q_seqlen[:, None]
        else:
            written = jnp.ones(query.shape[:2], bool)
        scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", query, key), -1e9)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return jnp.where(written[..., None, None], out, 100.0)

    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", kernel)
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=(2, 7, 2, 8)), jnp.float32) for _ in range(3)]
    ends = None if lengths is None else jnp.asarray(lengths)
    visible = Visibility(causal=causal, key_lengths=ends)

    def results(attention):
        def loss(*arrays):
            out = attention(AttentionCall(*arrays, visible, 1.0))
            return jnp.square(out).sum(), out

        value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, out), gradients = value_and_grad(*arrays)
        return [out, *gradients]

    ours, expected = results(cudnn.cudnn_attention), results(explicit_attention)
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "deterministic"),
    [
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_a=1 --xla_gpu_deterministic_ops", True),
        ("--xla_gpu_exclude_nondeterministic_ops=1 --xla_b=2", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("", False),
    ],
)
def test_deterministic_operations_of_xla_exclude_cudnn(monkeypatch, flags, deterministic):
    monkeypatch.setenv("XLA_FLAGS", flags)
    array = jnp.zeros((2, 8, 2, 8), jnp.bfloat16)
    spec = attention_spec(array, array, Visibility(), None, 0.0)
    assert spec.deterministic == deterministic
    reason = cudnn.unsupported_reason(dataclasses.replace(SPEC, deterministic=spec.deterministic))
    assert (reason is not None and "deterministic" in reason) == deterministic
