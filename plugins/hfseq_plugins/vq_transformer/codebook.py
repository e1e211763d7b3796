"""Codebooks of keys: quantization with straight-through gradients, and moving averages.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes. In this module, the axis
of tokens precedes the axis of heads.
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
    """Variable for the statistics of codes, which the optimizer does not update."""


class QuantizedKeys(NamedTuple):
    """Quantized keys.

    Attributes:
        keys: The codebook vectors that replace the keys, `(B, T, Hk, K)`. Their gradient is passed
            to the original keys (straight-through).
        codes: The indices of these vectors in the codebook, int32 `(B, T, Hk)`.
        errors: The squared distances to the original keys, `(B, T, Hk)`.
    """

    keys: jax.Array
    codes: jax.Array
    errors: jax.Array


class Codebook(nnx.Module):
    """Moving averages of the number and the sum of the keys of each code.

    The vector of a code is the sum divided by the number. `new_sums` and `new_counts` accumulate
    the keys of all micro-batches of an optimizer step. :func:`update_codebooks` adds them to the
    moving averages once per step and resets them to 0.

    Args:
        heads: Number of key heads.
        codes: Number of codes.
        width: Width of the keys.
        floor: Minimum of the number by which a sum is divided.
        rngs: Random number generators for the initial values.
    """

    def __init__(self, heads: int, codes: int, width: int, floor: float, rngs: nnx.Rngs):
        # The variance is 1 / (heads * codes), as in the reference.
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
        """Adds the keys of a micro-batch to the statistics of the optimizer step.

        Args:
            keys: The original keys, `(B, T, Hk, K)`.
            codes: Their codes, `(B, T, Hk)`.
            mask: The tokens to include, `(B, T)`. `None` includes all tokens.
        """
        size = self.counts[...].shape[-1]
        if mask is not None:
            codes = jnp.where(mask[..., None] > 0, codes, size)
        sums, counts = sum_by_code(lax.stop_gradient(keys), codes, size)
        self.new_sums.set_value(self.new_sums[...] + sums)
        self.new_counts.set_value(self.new_counts[...] + counts)


def quantize(keys: jax.Array, rows: jax.Array) -> QuantizedKeys:
    """Replaces keys by the nearest vectors of a codebook.

    The vector c that is nearest to a key k has the largest `k.c - |c|^2 / 2`. The dot products are
    computed in full precision on every device, because a rounding error could select another code.

    Args:
        keys: Keys, float32 `(B, T, Hk, K)`.
        rows: The codebook, `(Hk, S, K)`.
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
    # This order of operations returns the exact value of the codebook vector.
    return QuantizedKeys(nearest + (keys - lax.stop_gradient(keys)), codes, errors)


def sum_by_code(values: jax.Array, codes: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Sums values by code.

    Args:
        values: Vectors of F features for H heads, `(B, T, H, F)`.
        codes: The code of each vector, `(B, T, H)`. Vectors with codes of at least `size` are
            ignored.
        size: The number of codes S.

    Returns:
        Float32 sums, `(H, S, F)`, and counts, `(H, S)`.
    """
    heads, width = values.shape[-2:]
    # The batch and token axes are not flattened, because that would gather tokens that are sharded
    # over devices.
    indices = jnp.where(codes < size, codes + size * jnp.arange(heads), heads * size)
    values_f32 = values.astype(jnp.float32)
    sums = jnp.zeros((heads * size, width)).at[indices].add(values_f32, mode="drop")
    counts = jnp.zeros(heads * size).at[indices].add(1.0, mode="drop")
    return sums.reshape(heads, size, width), counts.reshape(heads, size)


def update_codebooks(tree: Mapping[str, Any], decay: float) -> dict[str, Any]:
    """Updates the moving averages of all codebooks at the end of an optimizer step.

    Args:
        tree: The collection `codebook`, or a part of it.
        decay: Decay rate of the moving averages.
    """
    if "new_sums" not in tree:
        return {name: update_codebooks(part, decay) for name, part in tree.items()}
    averages = {
        name: decay * tree[name] + (1.0 - decay) * tree[f"new_{name}"]
        for name in ("sums", "counts")
    }
    return averages | {f"new_{name}": jnp.zeros_like(leaf) for name, leaf in averages.items()}


def perplexities(tree: Mapping[str, Any]) -> list[jax.Array]:
    """Returns the perplexity of each codebook, the exponential of the entropy of its codes."""
    if "counts" not in tree:
        return [value for part in tree.values() for value in perplexities(part)]
    shares = tree["counts"] / jnp.maximum(tree["counts"].sum(-1, keepdims=True), 1e-30)
    entropy = -jnp.where(shares > 0, shares * jnp.log(jnp.maximum(shares, 1e-30)), 0.0).sum(-1)
    return [jnp.exp(entropy).mean()]
