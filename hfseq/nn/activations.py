"""Activations by the names that Hugging Face configurations use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError, nearest

Activation = Callable[[jax.Array], jax.Array]

_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
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
