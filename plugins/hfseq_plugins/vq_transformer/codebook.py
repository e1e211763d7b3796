"""Codebooks of keys: quantization with straight-through gradients, and moving averages.

Dimensions in shapes are those of :mod:`hfseq_plugins.vq_transformer.blocks`. In this module tokens
precede heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfseq.nn.cpu import fast_argmax


@nnx.register_variable_name("codebook")
class CodebookVariable(nnx.Variable):
    """Statistics of codes. They are not parameters, so optimizers do not update them."""


class QuantizedKeys(NamedTuple):
    """Quantized keys.

    Attributes:
        keys: The codebook rows, with the gradient of the original keys, `(B, T, Hk, K)`.
        codes: Int32 `(B, T, Hk)`.
        errors: The squared distances to the original keys, `(B, T, Hk)`.
    """

    keys: jax.Array
    codes: jax.Array
    errors: jax.Array


class Codebook(nnx.Module):
    """Moving averages of the sums and counts of the keys of each code.

    `new_sums` and `new_counts` accumulate the statistics of an optimizer step over its
    micro-batches. :func:`update_codebooks` applies them once and resets them to 0.
    """

    def __init__(self, heads: int, codes: int, width: int, floor: float, rngs: nnx.Rngs):
        # One over the fan-in, which includes the heads, as in the reference: rows start short.
        scale = (heads * codes) ** -0.5
        shape = (heads, codes, width)
        self.sums = CodebookVariable(scale * jax.random.normal(rngs.params(), shape))
        self.counts = CodebookVariable(jnp.ones(shape[:2]))
        self.new_sums = CodebookVariable(jnp.zeros(shape))
        self.new_counts = CodebookVariable(jnp.zeros(shape[:2]))
        self.floor = floor

    def rows(self) -> jax.Array:
        """Returns the codebook, `(Hk, S, K)`, without a gradient."""
        counts = jnp.maximum(self.counts[...], self.floor)
        return lax.stop_gradient(self.sums[...] / counts[..., None])

    def count(self, keys: jax.Array, codes: jax.Array, mask: jax.Array | None) -> None:
        """Adds the keys of a micro-batch to the statistics of the step.

        Args:
            keys: `(B, T, Hk, K)`.
            codes: `(B, T, Hk)`.
            mask: The tokens that count, `(B, T)`. `None` for all.
        """
        size = self.counts[...].shape[-1]
        if mask is not None:
            codes = jnp.where(mask[..., None] > 0, codes, size)
        sums, counts = sum_by_code(lax.stop_gradient(keys), codes, size)
        self.new_sums.set_value(self.new_sums[...] + sums)
        self.new_counts.set_value(self.new_counts[...] + counts)


def quantize(keys: jax.Array, rows: jax.Array) -> QuantizedKeys:
    """Replaces float32 keys `(B, T, Hk, K)` by their nearest codebook rows `(Hk, S, K)`.

    The nearest row c of a key k has the largest k.c - |c|^2 / 2. The products use full precision on
    every device, since a different code changes the result by more than a rounding error.
    """
    heads, size, width = rows.shape
    halves = 0.5 * jnp.square(rows).sum(-1)
    products = jnp.einsum(
        "bthk,hsk->bths", lax.stop_gradient(keys), rows, precision=lax.Precision.HIGHEST
    )
    codes = fast_argmax(products - halves)
    flat = codes + size * jnp.arange(heads, dtype=codes.dtype)
    nearest = jnp.take(rows.reshape(heads * size, width), flat, axis=0, mode="clip")
    errors = jnp.square(keys - nearest).sum(-1)
    # This order of operations keeps the exact value of the codebook row.
    return QuantizedKeys(nearest + (keys - lax.stop_gradient(keys)), codes, errors)


def sum_by_code(values: jax.Array, codes: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Sums values by code.

    Args:
        values: `(B, T, H, F)`.
        codes: `(B, T, H)`. Codes from `size` on are ignored.
        size: The number of codes S.

    Returns:
        Float32 sums, `(H, S, F)`, and counts, `(H, S)`.
    """
    heads, width = values.shape[-2:]
    # Without flattening the tokens, which would gather tokens that are sharded over devices.
    indices = jnp.where(codes < size, codes + size * jnp.arange(heads), heads * size)
    values_f32 = values.astype(jnp.float32)
    sums = jnp.zeros((heads * size, width)).at[indices].add(values_f32, mode="drop")
    counts = jnp.zeros(heads * size).at[indices].add(1.0, mode="drop")
    return sums.reshape(heads, size, width), counts.reshape(heads, size)


def update_codebooks(tree: Mapping[str, Any], decay: float) -> dict[str, Any]:
    """Updates the moving averages of all codebooks in a collection, once per optimizer step."""
    if "new_sums" not in tree:
        return {name: update_codebooks(part, decay) for name, part in tree.items()}
    averages = {
        name: decay * tree[name] + (1.0 - decay) * tree[f"new_{name}"]
        for name in ("sums", "counts")
    }
    return averages | {f"new_{name}": jnp.zeros_like(leaf) for name, leaf in averages.items()}


def perplexities(tree: Mapping[str, Any]) -> list[jax.Array]:
    """Returns the perplexity of each codebook, exp(entropy) of its averaged counts."""
    if "counts" not in tree:
        return [value for part in tree.values() for value in perplexities(part)]
    shares = tree["counts"] / jnp.maximum(tree["counts"].sum(-1, keepdims=True), 1e-30)
    entropy = -jnp.where(shares > 0, shares * jnp.log(jnp.maximum(shares, 1e-30)), 0.0).sum(-1)
    return [jnp.exp(entropy).mean()]
