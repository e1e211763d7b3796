"""Dynamic loss scaling for float16, whose smallest numbers swallow gradients.

The loss is multiplied by a power of two before differentiation and gradients are divided by it
(Micikevicius et al., 2018, section 3.2). A step whose gradients overflow is left out and halves the
factor; many steps without one double it. bfloat16 has float32's range and needs none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

FIRST = 2.0**10  # losses are sums over thousands of targets
LARGEST = 2.0**24
PATIENCE = 1000

Scale = dict[str, jax.Array]


def initial(compute_dtype: Any) -> Scale | None:
    """Return the scale that training starts with, or None where the type needs none."""
    if compute_dtype is None or jnp.dtype(compute_dtype) != jnp.float16:
        return None
    return {"factor": jnp.float32(FIRST), "good_steps": jnp.zeros((), jnp.int32)}


def overflowed(scale: Scale | None, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Tell whether only the scale is to blame for gradients that are not finite."""
    if scale is None:
        return jnp.zeros((), bool)
    return jnp.isfinite(loss) & ~jnp.isfinite(norm) & (scale["factor"] > 1)


def update(scale: Scale, overflow: jax.Array) -> Scale:
    """Return the scale of the next step."""
    good = jnp.where(overflow, 0, scale["good_steps"] + 1)
    grown = jnp.where(good == PATIENCE, jnp.minimum(2 * scale["factor"], LARGEST), scale["factor"])
    factor = jnp.where(overflow, scale["factor"] / 2, grown)
    return {"factor": factor, "good_steps": jnp.where(good == PATIENCE, 0, good)}
