"""Activations by the names that Hugging Face configurations use."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError, nearest

Activation = Callable[[jax.Array], jax.Array]


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    """Exact GELU by erf, in float32: half of the time of jax.nn.gelu's erfc, PyTorch's values.

    Rematerialised: only ``x`` is kept for the backward pass, not three arrays of its size.
    """
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


@jax.checkpoint
def _tanh_gelu(x: jax.Array) -> jax.Array:
    """GELU by tanh, in float32, as ``x sigmoid(2 z)``, which is ``0.5 x (1 + tanh z)``.

    jax.nn.gelu rounds its constants to a half type, and XLA's CPU kernels write them down as arrays
    of the size of ``x``: in bfloat16 the wide layer takes 1.7 times as long. Rematerialised.
    """
    y = x.astype(jnp.float32)
    slope = 2.0 * math.sqrt(2.0 / math.pi)
    return (y * jax.nn.sigmoid(y * (slope + 0.044715 * slope * y * y))).astype(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "mish": jax.nn.mish,
    "linear": lambda x: x,
}


def activation(name: str) -> Activation:
    """Return the activation called ``name`` in a Hugging Face configuration."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise UsageError(
            f"unknown activation '{name}' in the configuration{nearest(name, ACTIVATIONS)} "
            f"(known: {known})"
        )
    return ACTIVATIONS[name]
