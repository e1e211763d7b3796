"""Direct attention, which has a custom derivative, equals automatic differentiation."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn import cpu
from hfseq.nn.attention import attention_spec
from hfseq.nn.visible import Visibility
from tests.support.attention_cases import BATCH, HEADS, LENGTH, OPTIONS, arrays, results
from tests.support.tiers import first


@pytest.fixture
def directly(monkeypatch):
    """One CPU alone, as it is outside of the tests."""
    monkeypatch.setattr(cpu, "is_single_cpu", lambda: True)


@pytest.mark.parametrize(
    ("name", "rate"),
    first(
        itertools.product(OPTIONS, (0.0, 0.3)), ("plain", 0.0), *((name, 0.3) for name in OPTIONS)
    ),
)
def test_outputs_and_gradients_equal_explicit_attention(name, rate, request):
    explicit = results(OPTIONS[name], arrays(), rate, per_row=True)
    request.getfixturevalue("directly")
    direct = results(OPTIONS[name], arrays(), rate, per_row=True)
    for ours, theirs in zip(direct, explicit, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * max(1.0, float(abs(theirs).max())))


@pytest.mark.parametrize("shape", [(BATCH, 1), (1, HEADS)])
def test_the_gradient_of_a_broadcast_bias_is_summed(shape, request):
    bias = jax.random.normal(jax.random.key(4), (*shape, LENGTH, LENGTH))
    explicit = results({"bias": bias}, arrays(), 0.3, per_row=False)
    request.getfixturevalue("directly")
    direct = results({"bias": bias}, arrays(), 0.3, per_row=False)
    assert direct[-1].shape == bias.shape
    for ours, theirs in zip(direct, explicit, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gradients_equal_numpy_in_float64(directly):
    """One head without options, compared with the formulas of the softmax's derivative."""
    q, k, v, g = (np.asarray(leaf[:1, :, :1], np.float64)[0, :, 0] for leaf in arrays())
    weights = np.exp(q @ k.T / q.shape[1] ** 0.5)
    weights /= weights.sum(1, keepdims=True)
    change = weights * (g @ v.T - ((g @ v.T) * weights).sum(1, keepdims=True)) / q.shape[1] ** 0.5
    inputs = tuple(leaf[:1, :, :1] for leaf in arrays())
    mixed, *actual = results({}, inputs, 0.0, per_row=False)
    for ours, expected in zip(
        (mixed, *actual), (weights @ v, change @ k, change.T @ q, weights.T @ g), strict=True
    ):
        np.testing.assert_allclose(ours[0, :, 0], expected, atol=2e-6)


def test_different_number_of_keys(request):
    inputs = arrays(keys=6)
    explicit = results({}, inputs, 0.0, per_row=True)
    request.getfixturevalue("directly")
    for ours, theirs in zip(results({}, inputs, 0.0, per_row=True), explicit, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_direct_attention_requires_float32_equal_heads_and_a_single_cpu(monkeypatch):
    query, key, value, _ = arrays()

    def refusal(query, key):
        return cpu.direct_unsupported_reason(attention_spec(query, key, Visibility(), None, 0.0))

    assert refusal(query, key) == "it is for a single CPU"  # the tests have eight devices
    monkeypatch.setattr(cpu, "is_single_cpu", lambda: True)
    assert refusal(query, key) is None
    assert "float32" in refusal(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16))
    assert "grouped queries" in refusal(query, arrays(kv_heads=2)[1])


def test_products_do_not_transpose_their_inputs(directly):
    """Queries, keys, values and the output are each transposed once to put heads first."""
    query, key, value, _ = arrays()

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return nn.dot_product(query, key, value, is_causal=True).sum()

    text = str(jax.make_jaxpr(total)(query, key, value))
    assert text.count("transpose[") == 4
    both = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, value))
    assert both.count("transpose[") == 8
