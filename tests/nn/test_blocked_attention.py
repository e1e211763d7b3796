"""Attention in pieces gives what the explicit form gives: outputs, derivatives, dropped weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn import attention, blocked_attention, host
from hfseq.nn.random import batch_keys

BATCH, LENGTH, HEADS, WIDTH = 3, 10, 4, 8
SEGMENTS = jnp.array([[1] * 4 + [2] * 6, [1] * 10, [1] * 7 + [0] * 3])


@pytest.fixture
def in_pieces(monkeypatch):
    """Small arrays are cut as large ones are: two heads, or three queries of a causal row."""
    monkeypatch.setattr(blocked_attention, "one_cpu", lambda: True)
    monkeypatch.setattr(blocked_attention, "WORTHWHILE", 1)
    monkeypatch.setattr(blocked_attention, "AT_ONCE", 2 * LENGTH * LENGTH)
    monkeypatch.setattr(blocked_attention, "CAUSAL_QUERIES", 3)


def arrays(kv_heads: int = HEADS, keys: int = LENGTH) -> tuple[jax.Array, ...]:
    shapes = [(LENGTH, HEADS), (keys, kv_heads), (keys, kv_heads), (LENGTH, HEADS)]
    return tuple(
        jax.random.normal(jax.random.key(i), (BATCH, *shape, WIDTH))
        for i, shape in enumerate(shapes)
    )


def results(options: dict, inputs: tuple, rate: float, per_row: bool) -> tuple:
    """The mixed values and the derivatives for query, key, value and bias."""
    *parts, weight = inputs
    plain = {name: leaf for name, leaf in options.items() if name != "bias"}

    def total(parts: list, bias: jax.Array | None) -> tuple:
        key = jax.random.key(7)
        keys = batch_keys(key, jnp.arange(BATCH)) if per_row else nn.make_keys(key)
        given = {"dropout_rate": rate, "rngs": keys} if rate else {}
        query, key_, value = parts
        if given:
            mixed, _ = nn.attend(query, key_, value, bias=bias, **given, **plain)
        else:
            renamed = {"is_causal" if n == "causal" else n: leaf for n, leaf in plain.items()}
            mixed = attention.xla_attention(query, key_, value, bias=bias, **renamed)
        return (mixed * weight).sum(), mixed

    bias = options.get("bias")
    (_, mixed), changes = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(
        parts, bias
    )
    return mixed, *jax.tree.leaves(changes)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"mask": (SEGMENTS > 0)[:, None, None, :]},
    "documents": {"mask": nn.attention_mask(None, SEGMENTS.at[2, 7:].set(3)), "causal": True},
    "one mask for all rows": {"mask": jnp.tri(LENGTH, dtype=bool)[None, None]},
    "bias": {"bias": jax.random.normal(jax.random.key(9), (1, HEADS, LENGTH, LENGTH))},
    "bias and causal": {
        "bias": jax.random.normal(jax.random.key(9), (1, HEADS, LENGTH, LENGTH)),
        "causal": True, "scale": 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.3], ids=["kept", "dropped"])
@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_equal_the_explicit_form(name, rate, request):
    explicit = results(OPTIONS[name], arrays(), rate, per_row=True)
    request.getfixturevalue("in_pieces")
    pieces = results(OPTIONS[name], arrays(), rate, per_row=True)
    for ours, theirs in zip(pieces, explicit, strict=True):
        # Rounding is relative to the largest numbers that are summed, and differs by processor.
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * max(1.0, float(abs(theirs).max())))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_keys_and_a_key_for_the_batch(kv_heads, request):
    inputs, options = arrays(kv_heads), {"causal": True}
    explicit = results(options, inputs, 0.3, per_row=False)
    request.getfixturevalue("in_pieces")
    pieces = results(options, inputs, 0.3, per_row=False)
    for ours, theirs in zip(pieces, explicit, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_half_types_and_another_number_of_keys(request):
    inputs = [leaf.astype(jnp.bfloat16) for leaf in arrays(keys=6)]
    explicit = results({}, tuple(inputs), 0.3, per_row=True)
    request.getfixturevalue("in_pieces")
    pieces = results({}, tuple(inputs), 0.3, per_row=True)
    for ours, theirs in zip(pieces, explicit, strict=True):
        assert ours.dtype == theirs.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=0.06
        )


def test_nothing_of_the_size_of_all_scores_is_kept_or_made(in_pieces):
    """Of the loop's arrays none is as large as the scores of one row and all heads."""
    query, key, value, _ = arrays()

    def total(query: jax.Array) -> jax.Array:
        return attention.xla_attention(query, key, value, is_causal=True).sum()

    text = str(jax.make_jaxpr(jax.grad(total))(query))
    assert f"[{BATCH},{HEADS},{LENGTH},{LENGTH}]" not in text
    assert f"{HEADS},{LENGTH},{LENGTH}]" not in text


@pytest.mark.parametrize(
    ("shape", "mask", "bias"),
    [
        ((BATCH, 1, HEADS, WIDTH), None, None),  # a step of decoding
        ((BATCH, LENGTH, HEADS, WIDTH), (BATCH, HEADS, LENGTH, LENGTH), None),
        ((BATCH, LENGTH, HEADS, WIDTH), None, (BATCH, HEADS, LENGTH, LENGTH)),
    ],
)
def test_what_is_not_the_same_for_heads_or_rows_takes_the_explicit_form(
    in_pieces, shape, mask, bias
):
    query, key = jnp.zeros(shape), jnp.zeros((BATCH, LENGTH, HEADS, WIDTH))
    made = [None if dims is None else jnp.ones(dims, bool) for dims in (mask, bias)]
    assert not blocked_attention.worthwhile(query, key, *made)
    assert blocked_attention.worthwhile(key, key, None, None)


def test_only_one_cpu_alone_cuts():
    assert not host.one_cpu()  # the tests have eight devices
    large = jax.ShapeDtypeStruct((8, 512, 12, 64), jnp.float32)
    assert not blocked_attention.worthwhile(large, large, None, None)


def test_parts_of_drawn_bits_are_those_of_the_whole():
    for keys in (batch_keys(jax.random.key(1), jnp.arange(3)), nn.make_keys(jax.random.key(1))):
        drawn = keys.draw((6, 4, 5, 7))
        whole = np.asarray(drawn.all())
        part = drawn.part(jnp.array(4), jnp.array((2 * 5 + 1) * 7), (2, 3, 6))
        np.testing.assert_array_equal(part, whole[4, 2:4, 1:4, :6])
