"""Sums, and maxima that XLA's CPU backend would compute slowly if they were written as usual."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def first_maximum(x: jax.Array, top: jax.Array | None = None) -> jax.Array:
    """Return ``argmax(x, -1)`` as int32; ``top`` is ``x.max(-1)`` where it is known already.

    A reduction over pairs (value, place), as argmax is, is not vectorised on a CPU; two plain ones
    are. A row with NaN gives its last place.
    """
    top = x.max(-1) if top is None else top
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == top[..., None], places, x.shape[-1] - 1).min(-1)


def batched_dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract an axis of each, in every entry of their first axis, with sums in float32."""
    dimensions = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
