"""Blocked attention equals explicit attention: outputs, derivatives and dropped weights."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn import cpu
from hfseq.nn.attention import attention_spec
from hfseq.nn.random import batch_keys
from hfseq.nn.visible import Visibility
from tests.support.attention_cases import BATCH, HEADS, LENGTH, OPTIONS, WIDTH, arrays, results
from tests.support.tiers import first


@pytest.fixture
def in_blocks(monkeypatch):
    """Small arrays are cut as large ones are: two heads, or three queries of a causal row."""
    monkeypatch.setattr(cpu, "is_single_cpu", lambda: True)
    monkeypatch.setattr(cpu, "MIN_BLOCKED_SCORES", 1)
    monkeypatch.setattr(cpu, "BLOCK_SCORES", 2 * LENGTH * LENGTH)
    monkeypatch.setattr(cpu, "CAUSAL_BLOCK_QUERIES", 3)


@pytest.mark.parametrize(
    ("name", "rate"),
    first(itertools.product(OPTIONS, (0.0, 0.3)), ("causal", 0.3), ("documents", 0.3)),
)
def test_blocks_equal_explicit_attention(name, rate, request, monkeypatch):
    explicit = results(OPTIONS[name], arrays(), rate, per_row=True)
    request.getfixturevalue("in_blocks")
    for heads in (2, BATCH * HEADS):  # two heads of a row, or several rows
        monkeypatch.setattr(cpu, "BLOCK_SCORES", heads * LENGTH * LENGTH)
        pieces = results(OPTIONS[name], arrays(), rate, per_row=True)
        for ours, theirs in zip(pieces, explicit, strict=True):
            # Rounding is relative to the largest summed numbers, and differs by processor.
            limit = 2e-6 * max(1.0, float(abs(theirs).max()))
            np.testing.assert_allclose(ours, theirs, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_with_one_random_key_per_batch(kv_heads, request):
    inputs, options = arrays(kv_heads), {"causal": True}
    explicit = results(options, inputs, 0.3, per_row=False)
    request.getfixturevalue("in_blocks")
    pieces = results(options, inputs, 0.3, per_row=False)
    for ours, theirs in zip(pieces, explicit, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.slow
def test_half_types_with_a_different_number_of_keys(request):
    inputs = [leaf.astype(jnp.bfloat16) for leaf in arrays(keys=6)]
    explicit = results({}, tuple(inputs), 0.3, per_row=True)
    request.getfixturevalue("in_blocks")
    pieces = results({}, tuple(inputs), 0.3, per_row=True)
    for ours, theirs in zip(pieces, explicit, strict=True):
        assert ours.dtype == theirs.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=0.06
        )


def test_no_array_has_the_size_of_all_scores(in_blocks):
    """Of the loop's arrays none is as large as the scores of one row and all heads."""
    query, key, value, _ = arrays()

    def total(query: jax.Array) -> jax.Array:
        return nn.dot_product(query, key, value, is_causal=True).sum()

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
def test_masks_per_head_and_biases_per_row_are_unsupported(in_blocks, shape, mask, bias):
    query, key = jnp.zeros(shape), jnp.zeros((BATCH, LENGTH, HEADS, WIDTH))
    mask_and_bias = [None if dims is None else jnp.ones(dims, bool) for dims in (mask, bias)]
    visible = Visibility(dense=mask_and_bias[0])
    assert cpu.blocked_unsupported_reason(
        attention_spec(query, key, visible, mask_and_bias[1], 0.0)
    )
    assert cpu.blocked_unsupported_reason(attention_spec(key, key, Visibility(), None, 0.0)) is None


def test_blocks_are_only_used_on_a_single_cpu():
    assert not cpu.is_single_cpu()  # the tests have eight devices
    large = jax.ShapeDtypeStruct((8, 512, 12, 64), jnp.float32)
    why = cpu.blocked_unsupported_reason(attention_spec(large, large, Visibility(), None, 0.0))
    assert why == "it is for a single CPU"


@pytest.mark.slow
def test_slices_of_lazy_bits_match_the_array():
    for keys in (batch_keys(jax.random.key(1), jnp.arange(3)), nn.make_keys(jax.random.key(1))):
        bits = keys.draw((6, 4, 5, 7))
        all_bits = np.asarray(bits.all())
        part = bits.part(jnp.array(4), jnp.array((2 * 5 + 1) * 7), (2, 3, 6))
        np.testing.assert_array_equal(part, all_bits[4, 2:4, 1:4, :6])
