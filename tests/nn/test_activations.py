"""Activations equal PyTorch's, and half types are computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn

X = jnp.concatenate([jnp.linspace(-12, 12, 2001), jnp.array([-1e4, 1e4])])


def exact_tanh_gelu(x):
    x = np.asarray(x, np.float64)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_tanh_gelu_equals_its_formula():
    assert np.abs(np.asarray(nn.activation("gelu_new")(X)) - exact_tanh_gelu(X)).max() < 2e-6
    slope = jax.vmap(jax.grad(nn.activation("gelu_new")))(X)
    step = 1e-4
    expected = (exact_tanh_gelu(np.asarray(X, np.float64) + step) - exact_tanh_gelu(X)) / step
    assert np.abs(np.asarray(slope) - expected).max() < 2e-4


@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_half_types_are_rounded_once(name):
    half = X.astype(jnp.bfloat16)
    actual = jax.jit(nn.activation(name))(half)
    expected = np.asarray(nn.activation(name)(half.astype(jnp.float32)))
    assert actual.dtype == jnp.bfloat16
    # Half a unit in the last of eight bits. The last term is the rounding error of float32.
    assert np.allclose(np.asarray(actual, np.float32), expected, rtol=2.0**-8, atol=2e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu"])
def test_values_and_gradients_equal_pytorch(name):
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 501, requires_grad=True)
    y = ACT2FN[name](x)
    y.sum().backward()
    ours, pull = jax.vjp(nn.activation(name), jnp.asarray(x.detach().numpy()))
    assert np.allclose(ours, y.detach().numpy(), atol=1e-6)
    assert np.allclose(pull(jnp.ones_like(ours))[0], x.grad.numpy(), atol=5e-6)
