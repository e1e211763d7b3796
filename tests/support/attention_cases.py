"""Small inputs and options of attention, for tests that all implementations agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hfseq import nn
from hfseq.nn.random import batch_keys

BATCH, LENGTH, HEADS, WIDTH = 3, 10, 4, 8
SEGMENTS = jnp.array([[1] * 4 + [2] * 6, [1] * 10, [1] * 7 + [0] * 3])


def arrays(kv_heads: int = HEADS, keys: int = LENGTH) -> tuple[jax.Array, ...]:
    """Returns query, key, value, and the weights of the output in the loss of `results`."""
    shapes = [(LENGTH, HEADS), (keys, kv_heads), (keys, kv_heads), (LENGTH, HEADS)]
    return tuple(
        jax.random.normal(jax.random.key(i), (BATCH, *shape, WIDTH))
        for i, shape in enumerate(shapes)
    )


def results(options: dict, inputs: tuple, rate: float, per_row: bool) -> tuple:
    """Returns the output of attention, and the gradients of query, key, value and bias.

    Args:
        options: An entry of `OPTIONS`.
        inputs: The result of `arrays`.
        rate: The dropout rate.
        per_row: Whether each row of the batch has its own dropout key.
    """
    *parts, weight = inputs
    plain = {name: leaf for name, leaf in options.items() if name != "bias"}

    def total(parts: list, bias: jax.Array | None) -> tuple:
        key = jax.random.key(7)
        keys = batch_keys(key, jnp.arange(BATCH)) if per_row else nn.make_keys(key)
        dropout_options = {"dropout_rate": rate, "rngs": keys} if rate else {}
        query, key_, value = parts
        if dropout_options:
            mixed, _ = nn.attend(query, key_, value, bias=bias, **dropout_options, **plain)
        else:
            renamed = {"is_causal" if n == "causal" else n: leaf for n, leaf in plain.items()}
            mixed = nn.dot_product(query, key_, value, bias=bias, **renamed)
        return (mixed * weight).sum(), mixed

    bias = options.get("bias")
    (_, mixed), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(
        parts, bias
    )
    return mixed, *jax.tree.leaves(gradients)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"mask": (SEGMENTS > 0)[:, None, None, :]},
    "documents": {"mask": nn.attention_mask(None, SEGMENTS.at[2, 7:].set(3)), "causal": True},
    "one mask for all rows": {"mask": jnp.tri(LENGTH, dtype=bool)[None, None]},
    "fully masked rows": {"mask": (SEGMENTS < 1)[:, None, None, :]},
    "bias": {"bias": jax.random.normal(jax.random.key(9), (1, HEADS, LENGTH, LENGTH))},
    "bias and causal": {
        "bias": jax.random.normal(jax.random.key(9), (1, HEADS, LENGTH, LENGTH)),
        "causal": True,
        "scale": 1.0,
    },
}
