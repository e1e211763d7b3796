"""Our Triton kernels, run as plain jax, against attention written down densely in float32."""

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
from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.kernels import flash
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import LazyBits, batch_keys
from hfseq.nn.visible import Visibility

# Neither the positions nor the width of a head fill whole tiles; there are several tiles.
BATCH, LENGTH, HEADS, WIDTH = 4, 150, 4, 24
SCALE = WIDTH**-0.5


def rows(*runs: list[tuple[int, int]]) -> jax.Array:
    """Rows of segments, each said by runs (segment, how many positions)."""
    return jnp.array([[s for s, n in row for _ in range(n)] for row in runs], jnp.int32)


# By row: no padding, padding left, right, and in the middle (or three documents in a row).
PACKED = rows(
    [(1, 70), (2, 80)],
    [(0, 40), (1, 60), (2, 50)],
    [(1, 33), (2, 64), (3, 20), (0, 33)],
    [(5, 1), (3, 99), (4, 50)],
)
THERE = rows([(1, 150)], [(0, 70), (1, 80)], [(1, 90), (0, 60)], [(1, 20), (0, 100), (2, 30)])
HIDDEN = {
    "nothing": {},
    "packed": {"query_segments": PACKED},
    "padding": {"key_segments": THERE},
    "lengths": {"key_lengths": jnp.array([150, 97, 32, 1], jnp.int32)},
}
BANDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0)},
    "both sides": {"window": (40, 17)},
}
CASES = list(itertools.product(HIDDEN, BANDS, (HEADS, 2), (0.0, 0.1)))
#: Each pair of what is hidden with heads, dropout, and most of those with a band.
AT_EVERY_CHANGE = [
    ("packed", "causal", 2, 0.1),
    ("packed", "both sides", HEADS, 0.0),
    ("padding", "full", HEADS, 0.1),
    ("padding", "window", 2, 0.0),
    ("lengths", "both sides", 2, 0.1),
]


def arrays(
    kv_heads: int = HEADS, queries: int = LENGTH, keys: int = LENGTH, width: int = WIDTH
) -> tuple[jax.Array, ...]:
    """Query, key, value, and what each element of the result counts."""
    shapes = [(queries, HEADS), (keys, kv_heads), (keys, kv_heads), (queries, HEADS)]
    return tuple(
        jax.random.normal(jax.random.key(i), (BATCH, *shape, width))
        for i, shape in enumerate(shapes)
    )


def bits(queries: int = LENGTH, keys: int = LENGTH, per_row: bool = True) -> LazyBits:
    key = jax.random.key(7)
    chosen = batch_keys(key, jnp.arange(BATCH)) if per_row else nn.make_keys(key)
    return chosen.draw((BATCH, HEADS, queries, keys))


def dense(query, key, value, visible, *, scale, rate, drawn, bias=0.0):
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(leaf, shared, axis=2) for leaf in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * scale + bias
    mask = visible.array(query.shape[1], key.shape[1])
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    weights = jnp.where(mask, weights, 0.0)
    if rate:
        weights = dropout_with_bits(weights, rate, drawn.all())
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


def results(attend, inputs, visible, rate=0.0, drawn=None, **options) -> list[np.ndarray]:
    """What is attended to, and the gradients of query, key and value."""
    *parts, counts = inputs
    drawn = drawn if rate else None

    def attended(*parts):
        return attend(*parts, visible, scale=SCALE, rate=rate, drawn=drawn, **options)

    @jax.jit
    def both(parts, counts):
        out, back = jax.vjp(attended, *parts)
        return out, *back(counts.astype(out.dtype))

    return [np.asarray(leaf, np.float32) for leaf in both(parts, counts)]


def gradients_with(bias, attend, inputs, visible, rate, drawn, **options) -> list[np.ndarray]:
    """What is attended to with a bias, and the gradients of query, key, value and the bias."""
    *parts, counts = inputs

    @jax.jit
    def both(bias, parts, counts):
        def attended(bias, *parts):
            return attend(
                *parts, visible, bias=bias, scale=SCALE, rate=rate, drawn=drawn, **options
            )

        out, back = jax.vjp(attended, bias, *parts)
        of_bias, *others = back(counts)
        return out, *others, of_bias

    return [np.asarray(leaf) for leaf in both(bias, parts, counts)]


def assert_close(ours, theirs, forward: float, backward: float) -> None:
    tolerances = [forward, *[backward] * (len(ours) - 1)]
    for mine, other, tolerance in zip(ours, theirs, tolerances, strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance * abs(other).max())


@pytest.mark.parametrize(
    ("hidden", "band", "kv_heads", "rate"),
    [
        case if case in AT_EVERY_CHANGE else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_output_and_gradients_are_those_of_the_dense_form(hidden, band, kv_heads, rate):
    visible, inputs, drawn = Visibility(**HIDDEN[hidden], **BANDS[band]), arrays(kv_heads), bits()
    ours = results(flash.flash_attention, inputs, visible, rate, drawn, interpret=True)
    theirs = results(dense, inputs, visible, rate, drawn)
    assert_close(ours, theirs, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("bfloat16", 64),
        pytest.param("float16", 80, marks=pytest.mark.slow),
        pytest.param("bfloat16", 256, marks=pytest.mark.slow),
    ],
)
def test_half_types_round_and_no_more(dtype, width):
    inputs = [leaf.astype(dtype) for leaf in arrays(2, 200, 200, width)]
    visible, drawn = Visibility(causal=True, window=(130, 0)), bits(200, 200)
    ours = results(flash.flash_attention, inputs, visible, 0.1, drawn, interpret=True)
    wide = [leaf.astype(jnp.float32) for leaf in inputs]
    assert_close(ours, results(dense, wide, visible, 0.1, drawn), 2e-2, 4e-2)


@pytest.mark.parametrize(
    ("own", "hidden", "band", "rate"),
    [
        (1, "padding", "full", 0.1),
        pytest.param(1, "lengths", "causal", 0.0, marks=pytest.mark.slow),
        pytest.param(BATCH, "packed", "both sides", 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_bias_is_added_and_has_a_gradient(own, hidden, band, rate):
    visible, inputs = Visibility(**HIDDEN[hidden], **BANDS[band]), arrays(2)
    bias = jax.random.normal(jax.random.key(8), (own, HEADS, LENGTH, LENGTH))
    given = inputs, visible, rate, bits() if rate else None
    ours = gradients_with(bias, flash.flash_attention, *given, interpret=True)
    assert_close(ours, gradients_with(bias, dense, *given), 1e-5, 1e-5)


@pytest.mark.parametrize("band", ["causal", pytest.param("both sides", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("queries", "keys"), [(70, 130), (130, 70)])
def test_other_numbers_of_keys_and_queries_that_see_none(queries, keys, band):
    """Aligned at the end, the first of more queries than keys see nothing: 0, and no gradient."""
    visible, inputs = Visibility(**BANDS[band]), arrays(2, queries, keys)
    ours = results(flash.flash_attention, inputs, visible, interpret=True)
    assert_close(ours, results(dense, inputs, visible), 1e-5, 1e-5)
    blind = ~np.broadcast_to(np.asarray(visible.array(queries, keys)).any(-1)[0, 0], (queries,))
    assert blind.any() == (queries > keys)
    assert not ours[0][:, blind].any() and not ours[1][:, blind].any()


def test_queries_of_a_segment_without_keys_are_zero_and_count_nowhere():
    """Also inside of a tile whose other queries see something."""
    segments = PACKED.at[:, 100:107].set(9)
    visible = Visibility(query_segments=segments, key_segments=PACKED)
    inputs = arrays(2)
    ours = results(flash.flash_attention, inputs, visible, interpret=True)
    assert_close(ours, results(dense, inputs, visible), 1e-5, 1e-5)
    assert not ours[0][:, 100:107].any() and not ours[1][:, 100:107].any()


def test_no_document_feels_another():
    """All that row 0's second document is made of changes; nothing of the first does, to a bit."""
    visible = Visibility(query_segments=PACKED)
    inputs = arrays(2)
    other = [leaf.at[0, 70:].set(37.0 * leaf[0, 70:] + 1.0) for leaf in inputs]
    before, after = (
        results(flash.flash_attention, given, visible, 0.1, bits(), interpret=True)
        for given in (inputs, other)
    )
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[0, :70], two[0, :70])
        assert (one[0, 70:] != two[0, 70:]).any()


@pytest.mark.parametrize("per_row", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_very_weights_of_the_explicit_form_are_dropped(per_row):
    """With a one for each key as its value the result is the weights: in both passes."""
    size = 64
    query, key, *_ = arrays(queries=size, keys=size, width=size)
    eye = jnp.broadcast_to(jnp.eye(size)[None, :, None], query.shape)
    drawn = bits(size, size, per_row)
    out, _, _, of_value = results(
        flash.flash_attention, (query, key, eye, eye), Visibility(), 0.3, drawn, interpret=True
    )
    kept = np.asarray(dropout_with_bits(jnp.ones(drawn.shape), 0.3, drawn.all())) > 0
    assert 0.68 < kept.mean() < 0.72
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) > 0, kept)
    np.testing.assert_array_equal(of_value.transpose(0, 2, 3, 1) > 0, kept)


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mesh_divides_rows_and_heads_and_changes_nothing(kv_heads):
    mesh = jax.make_mesh(
        (2, 1, 2, 1),
        ("data", "fsdp", "tensor", "sequence"),
        axis_types=(AxisType.Auto,) * 4,
        devices=jax.devices()[:4],
    )
    visible, inputs, drawn = (
        Visibility(query_segments=PACKED, causal=True),
        arrays(kv_heads),
        bits(),
    )
    whole = results(flash.flash_attention, inputs, visible, 0.1, drawn, interpret=True)
    over = {1: PartitionSpec("data"), 2: PartitionSpec("data", None, "tensor")}[kv_heads]
    placed = [
        jax.device_put(
            leaf,
            NamedSharding(
                mesh, over if leaf.shape[2] == kv_heads else PartitionSpec("data", None, "tensor")
            ),
        )
        for leaf in inputs
    ]
    parts = results(flash.flash_attention, placed, visible, 0.1, drawn, interpret=True, mesh=mesh)
    assert_close(parts, whole, 1e-6, 1e-6)

    def attended(query, key, value):
        return flash.flash_attention(
            query,
            key,
            value,
            visible,
            scale=SCALE,
            rate=0.1,
            drawn=drawn,
            mesh=mesh,
            interpret=True,
        )

    text = jax.jit(attended).lower(*placed[:3]).compile().as_text()
    assert not [word for word in ("all-reduce", "all-gather", "all-to-all") if word in text]


@pytest.mark.parametrize("own", [1, pytest.param(BATCH, marks=pytest.mark.slow)])
def test_over_a_mesh_the_gradient_of_a_bias_is_that_of_all_rows(own):
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    bias = jax.random.normal(jax.random.key(8), (own, HEADS, LENGTH, LENGTH))
    given = arrays(2), Visibility(key_segments=THERE), 0.1, bits()
    whole = gradients_with(bias, flash.flash_attention, *given, interpret=True)
    parts = gradients_with(bias, flash.flash_attention, *given, interpret=True, mesh=mesh)
    assert_close(parts, whole, 1e-6, 1e-6)


SERVED = AttentionSpec(
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
        ({"head_dim": 264}, "wider than 256"),
        ({"head_dim": 160, "capability": (8, 0)}, "wider than 128"),
        ({"head_dim": 80, "dtype": "float32", "capability": (8, 9)}, "wider than 64"),
        ({"mask": (8, 1, 512, 512)}, "dense mask"),
        ({"bias": (1, 12, 512, 512)}, None),
        ({"bias": (8, 12, 512, 512)}, None),
        ({"bias": (1, 12, 1, 512)}, "bias"),
        ({"dropout": 1.0}, "nothing"),
        ({"mesh": (("data", 2), ("sequence", 2))}, "cuts sequences"),
        ({"batch": 12}, "8 devices do not divide a batch of 12"),
        ({"mesh": (("tensor", 5),)}, "5 devices do not divide 12 heads"),
    ],
)
def test_what_it_cannot_serve_it_refuses_with_the_reason(change, reason):
    said = flash.unsupported_reason(dataclasses.replace(SERVED, **change))
    assert said is None if reason is None else said is not None and reason in said


def test_what_it_would_not_see_is_never_passed_over():
    whole = jnp.ones((1, 1, LENGTH, LENGTH), bool)
    attend = functools.partial(flash.flash_attention, *arrays()[:3], scale=SCALE, interpret=True)
    with pytest.raises(ValueError, match="dense mask"):
        attend(Visibility(dense=whole))
    with pytest.raises(ValueError, match=r"bias of \(1, 1, 150, 150\)"):
        attend(Visibility(), bias=whole.astype(jnp.float32))
