"""The Triton kernels, run as plain jax, compared with dense attention in float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hfseq import nn
from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.kernels import flash
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import LazyBits, batch_keys
from hfseq.nn.visible import Visibility

# Several tiles, and neither the length nor the width of a head is a multiple of the tile size.
BATCH, LENGTH, HEADS, WIDTH = 4, 150, 4, 24
SCALE = WIDTH**-0.5


def rows(*runs: list[tuple[int, int]]) -> jax.Array:
    """Rows of segment ids. Each row is given as runs (segment, number of positions)."""
    return jnp.array([[s for s, n in row for _ in range(n)] for row in runs], jnp.int32)


# Rows without padding, with padding on the left, on the right, and in the middle (or three
# documents).
PACKED = rows(
    [(1, 70), (2, 80)],
    [(0, 40), (1, 60), (2, 50)],
    [(1, 33), (2, 64), (3, 20), (0, 33)],
    [(5, 1), (3, 99), (4, 50)],
)
PADDED = rows([(1, 150)], [(0, 70), (1, 80)], [(1, 90), (0, 60)], [(1, 20), (0, 100), (2, 30)])
HIDDEN = {
    "nothing": {},
    "packed": {"query_segments": PACKED},
    "padding": {"key_segments": PADDED},
    "lengths": {"key_lengths": jnp.array([150, 97, 32, 1], jnp.int32)},
}
BANDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0)},
    "both sides": {"window": (40, 17)},
}
CASES = list(itertools.product(HIDDEN, BANDS, (HEADS, 2), (0.0, 0.1)))
#: Cases of the fast tests: each kind of hidden keys, number of heads, band and dropout rate.
FAST_CASES = [
    ("packed", "causal", 2, 0.1),
    ("padding", "window", HEADS, 0.0),
    ("lengths", "both sides", 2, 0.1),
]


def arrays(
    kv_heads: int = HEADS, queries: int = LENGTH, keys: int = LENGTH, width: int = WIDTH
) -> tuple[jax.Array, ...]:
    """Query, key, value, and the cotangent of the result."""
    shapes = [(queries, HEADS), (keys, kv_heads), (keys, kv_heads), (queries, HEADS)]
    return tuple(
        jax.random.normal(jax.random.key(i), (BATCH, *shape, width))
        for i, shape in enumerate(shapes)
    )


def make_bits(queries: int = LENGTH, keys: int = LENGTH, per_row: bool = True) -> LazyBits:
    key = jax.random.key(7)
    keys_of_batch = batch_keys(key, jnp.arange(BATCH)) if per_row else nn.make_keys(key)
    return keys_of_batch.draw((BATCH, HEADS, queries, keys))


def attend_dense(call: AttentionCall) -> jax.Array:
    group = call.query.shape[2] // call.key.shape[2]
    key, value = (jnp.repeat(leaf, group, axis=2) for leaf in (call.key, call.value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", call.query, key, precision="highest") * call.scale
    if call.bias is not None:
        scores = scores + call.bias
    mask = call.visible.array(call.queries, call.keys)
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    weights = jnp.where(mask, weights, 0.0)
    if call.dropout_rate:
        weights = dropout_with_bits(weights, call.dropout_rate, call.dropout_bits.all())
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


attend_flash = functools.partial(flash.flash_attention, interpret=True)


def results(attend, inputs, visible, rate=0.0, bits=None, mesh=None) -> list[np.ndarray]:
    """The output, and the gradients of query, key and value."""
    *parts, cotangent = inputs
    bits = bits if rate else None

    def attended(*parts):
        call = AttentionCall(
            *parts, visible, SCALE, dropout_rate=rate, dropout_bits=bits, mesh=mesh
        )
        return attend(call)

    @jax.jit
    def output_and_gradients(parts, cotangent):
        out, back = jax.vjp(attended, *parts)
        return out, *back(cotangent.astype(out.dtype))

    return [np.asarray(leaf, np.float32) for leaf in output_and_gradients(parts, cotangent)]


def results_with_bias(bias, attend, inputs, visible, rate, bits, mesh=None) -> list[np.ndarray]:
    """The output with a bias, and the gradients of query, key, value and the bias."""
    *parts, cotangent = inputs

    @jax.jit
    def output_and_gradients(bias, parts, cotangent):
        def attended(bias, *parts):
            call = AttentionCall(
                *parts, visible, SCALE, bias, dropout_rate=rate, dropout_bits=bits, mesh=mesh
            )
            return attend(call)

        out, back = jax.vjp(attended, bias, *parts)
        bias_gradient, *gradients = back(cotangent)
        return out, *gradients, bias_gradient

    return [np.asarray(leaf) for leaf in output_and_gradients(bias, parts, cotangent)]


@functools.cache
def flash_results(hidden: str, band: str, kv_heads: int, rate: float) -> list[np.ndarray]:
    visible = Visibility(**HIDDEN[hidden], **BANDS[band])
    return results(attend_flash, arrays(kv_heads), visible, rate, make_bits())


def bias_case(bias_rows: int, hidden: str, band: str, rate: float) -> tuple[jax.Array, tuple]:
    """A bias and the other arguments of `results_with_bias`."""
    bias = jax.random.normal(jax.random.key(8), (bias_rows, HEADS, LENGTH, LENGTH))
    visible = Visibility(**HIDDEN[hidden], **BANDS[band])
    return bias, (arrays(2), visible, rate, make_bits() if rate else None)


@functools.cache
def flash_with_bias(bias_rows: int, hidden: str, band: str, rate: float) -> list[np.ndarray]:
    bias, arguments = bias_case(bias_rows, hidden, band, rate)
    return results_with_bias(bias, attend_flash, *arguments)


def assert_close(ours, theirs, forward: float, backward: float) -> None:
    tolerances = [forward, *[backward] * (len(ours) - 1)]
    for mine, other, tolerance in zip(ours, theirs, tolerances, strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance * abs(other).max())


@pytest.mark.parametrize(
    ("hidden", "band", "kv_heads", "rate"),
    [case if case in FAST_CASES else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_output_and_gradients_equal_dense_attention(hidden, band, kv_heads, rate):
    visible = Visibility(**HIDDEN[hidden], **BANDS[band])
    theirs = results(attend_dense, arrays(kv_heads), visible, rate, make_bits())
    assert_close(flash_results(hidden, band, kv_heads, rate), theirs, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("bfloat16", 64),
        pytest.param("float16", 80, marks=pytest.mark.slow),
        pytest.param("bfloat16", 256, marks=pytest.mark.slow),
    ],
)
def test_half_types_differ_only_by_rounding(dtype, width):
    inputs = [leaf.astype(dtype) for leaf in arrays(2, 200, 200, width)]
    visible, bits = Visibility(causal=True, window=(130, 0)), make_bits(200, 200)
    ours = results(attend_flash, inputs, visible, 0.1, bits)
    wide = [leaf.astype(jnp.float32) for leaf in inputs]
    assert_close(ours, results(attend_dense, wide, visible, 0.1, bits), 2e-2, 4e-2)


@pytest.mark.parametrize(
    ("bias_rows", "hidden", "band", "rate"),
    [
        (1, "padding", "full", 0.1),
        pytest.param(1, "lengths", "causal", 0.0, marks=pytest.mark.slow),
        pytest.param(BATCH, "packed", "both sides", 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_bias_is_added_and_has_a_gradient(bias_rows, hidden, band, rate):
    bias, arguments = bias_case(bias_rows, hidden, band, rate)
    theirs = results_with_bias(bias, attend_dense, *arguments)
    assert_close(flash_with_bias(bias_rows, hidden, band, rate), theirs, 1e-5, 1e-5)


@pytest.mark.parametrize("band", ["causal", pytest.param("both sides", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("queries", "keys"), [pytest.param(70, 130, marks=pytest.mark.slow), (130, 70)]
)
def test_different_numbers_of_queries_and_keys(queries, keys, band):
    """Sequences are aligned at their ends, so the first of more queries than keys see no key."""
    visible, inputs = Visibility(**BANDS[band]), arrays(2, queries, keys)
    ours = results(attend_flash, inputs, visible)
    assert_close(ours, results(attend_dense, inputs, visible), 1e-5, 1e-5)
    sees_any = np.asarray(visible.array(queries, keys)).any(-1)[0, 0]
    masked = ~np.broadcast_to(sees_any, (queries,))
    assert masked.any() == (queries > keys)
    assert not ours[0][:, masked].any() and not ours[1][:, masked].any()


@pytest.mark.slow
def test_queries_of_a_segment_without_keys_give_zeros_and_no_gradient():
    """Other queries of the same tile do see keys."""
    segments = PACKED.at[:, 100:107].set(9)
    visible = Visibility(query_segments=segments, key_segments=PACKED)
    inputs = arrays(2)
    ours = results(attend_flash, inputs, visible)
    assert_close(ours, results(attend_dense, inputs, visible), 1e-5, 1e-5)
    assert not ours[0][:, 100:107].any() and not ours[1][:, 100:107].any()


@pytest.mark.slow
def test_documents_are_independent():
    """A change of row 0's second document does not change a bit of the first one's results."""
    visible = Visibility(query_segments=PACKED)
    inputs = arrays(2)
    changed_inputs = [leaf.at[0, 70:].set(37.0 * leaf[0, 70:] + 1.0) for leaf in inputs]
    original, changed = (
        results(attend_flash, arguments, visible, 0.1, make_bits())
        for arguments in (inputs, changed_inputs)
    )
    for first, second in zip(original, changed, strict=True):
        np.testing.assert_array_equal(first[0, :70], second[0, :70])
        assert (first[0, 70:] != second[0, 70:]).any()


@pytest.mark.parametrize("per_row", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dropout_drops_the_same_weights_as_the_explicit_implementation(per_row):
    """With one-hot values the output is the weights, in both passes."""
    size = 64
    query, key, *_ = arrays(queries=size, keys=size, width=size)
    eye = jnp.broadcast_to(jnp.eye(size)[None, :, None], query.shape)
    bits = make_bits(size, size, per_row)
    out, _, _, value_gradient = results(
        attend_flash, (query, key, eye, eye), Visibility(), 0.3, bits
    )
    kept_weights = np.asarray(dropout_with_bits(jnp.ones(bits.shape), 0.3, bits.all())) > 0
    assert 0.68 < kept_weights.mean() < 0.72
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) > 0, kept_weights)
    np.testing.assert_array_equal(value_gradient.transpose(0, 2, 3, 1) > 0, kept_weights)


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mesh_splits_rows_and_heads_without_changing_results(kv_heads):
    mesh = jax.make_mesh(
        (2, 1, 2, 1),
        ("data", "fsdp", "tensor", "sequence"),
        axis_types=(AxisType.Auto,) * 4,
        devices=jax.devices()[:4],
    )
    visible, bits = Visibility(query_segments=PACKED, causal=True), make_bits()
    inputs = arrays(kv_heads)
    expected = flash_results("packed", "causal", kv_heads, 0.1)
    over = {1: PartitionSpec("data"), 2: PartitionSpec("data", None, "tensor")}[kv_heads]
    sharded_inputs = [
        jax.device_put(
            leaf,
            NamedSharding(
                mesh, over if leaf.shape[2] == kv_heads else PartitionSpec("data", None, "tensor")
            ),
        )
        for leaf in inputs
    ]
    sharded = results(attend_flash, sharded_inputs, visible, 0.1, bits, mesh=mesh)
    assert_close(sharded, expected, 1e-6, 1e-6)

    def attended(query, key, value):
        call = AttentionCall(
            query, key, value, visible, SCALE, dropout_rate=0.1, dropout_bits=bits, mesh=mesh
        )
        return attend_flash(call)

    text = jax.jit(attended).lower(*sharded_inputs[:3]).compile().as_text()
    assert not [word for word in ("all-reduce", "all-gather", "all-to-all") if word in text]


@pytest.mark.parametrize("bias_rows", [1, pytest.param(BATCH, marks=pytest.mark.slow)])
def test_over_a_mesh_the_gradient_of_a_bias_sums_all_rows(bias_rows):
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    case = bias_rows, "padding", "full", 0.1
    bias, arguments = bias_case(*case)
    sharded = results_with_bias(bias, attend_flash, *arguments, mesh=mesh)
    assert_close(sharded, flash_with_bias(*case), 1e-6, 1e-6)


SUPPORTED = AttentionSpec(
    *("cuda", 8, 512, 512, 12, 4, 64, "bfloat16"),
    capability=(9, 0),
    causal=True,
    window=(5, 9),
    segments="same",
    lengths=True,
    dropout=0.1,
    mesh=(("data", 4), ("fsdp", 2), ("tensor", 4)),
    devices=32,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "float32", "head_dim": 256, "mesh": ()}, None),
        ({"platform": "tpu", "capability": None}, "NVIDIA"),
        ({"platform": "rocm", "capability": None}, "NVIDIA"),
        ({"capability": (7, 5)}, "8.0"),
        ({"capability": None}, "8.0"),
        ({"dtype": "float64"}, "float64"),
        ({"head_dim": 264}, "264 exceeds 256"),
        ({"head_dim": 160, "capability": (8, 0)}, "160 exceeds 128"),
        ({"head_dim": 80, "dtype": "float32", "capability": (8, 9)}, "80 exceeds 64"),
        ({"mask": (8, 1, 512, 512)}, "dense mask"),
        ({"bias": (1, 12, 512, 512)}, None),
        ({"bias": (8, 12, 512, 512)}, None),
        ({"bias": (1, 12, 1, 512)}, "bias"),
        ({"dropout": 1.0}, "dropout rate of 1"),
        ({"mesh": (("data", 2), ("sequence", 2))}, "splits sequences"),
        ({"batch": 12}, "8 devices do not divide a batch of 12"),
        ({"mesh": (("tensor", 5),)}, "5 devices do not divide 12 heads"),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(change, reason):
    actual = flash.unsupported_reason(dataclasses.replace(SUPPORTED, **change))
    assert actual is None if reason is None else actual is not None and reason in actual


def test_unsupported_inputs_are_never_ignored():
    full = jnp.ones((1, 1, LENGTH, LENGTH), bool)
    inputs = arrays()[:3]
    with pytest.raises(ValueError, match="dense mask"):
        attend_flash(AttentionCall(*inputs, Visibility(dense=full), SCALE))
    with pytest.raises(ValueError, match=r"not \(1, 1, 150, 150\)"):
        attend_flash(AttentionCall(*inputs, Visibility(), SCALE, full.astype(jnp.float32)))
