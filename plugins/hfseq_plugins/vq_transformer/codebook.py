"""The codebook of a layer's keys: nearest rows, straight-through gradients, and moving averages."""

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
    """Statistics of codes: not a parameter, so no optimizer and no decay ever touches them."""


class QuantizedKeys(NamedTuple):
    """Keys by their codes.

    ``keys`` (B, T, Hk, K) have the codebook's values and the original keys' gradient, ``codes`` are
    (B, T, Hk) int32, ``errors`` (B, T, Hk) the squared distances.
    """

    keys: jax.Array
    codes: jax.Array
    errors: jax.Array


class Codebook(nnx.Module):
    """Sums and counts of the keys that each code stood for, averaged over optimizer steps.

    ``new_sums`` and ``new_counts`` collect a step's statistics over its micro-batches;
    :func:`settle` applies them once and sets them back to 0.
    """

    def __init__(self, heads: int, codes: int, width: int, floor: float, rngs: nnx.Rngs):
        # One over the fan-in, which counts the heads: rows start short.
        scale = (heads * codes) ** -0.5
        shape = (heads, codes, width)
        self.sums = CodebookVariable(scale * jax.random.normal(rngs.params(), shape))
        self.counts = CodebookVariable(jnp.ones(shape[:2]))
        self.new_sums = CodebookVariable(jnp.zeros(shape))
        self.new_counts = CodebookVariable(jnp.zeros(shape[:2]))
        self.floor = floor

    def rows(self) -> jax.Array:
        """Return the codebook (Hk, S, K), without a gradient."""
        counts = jnp.maximum(self.counts[...], self.floor)
        return lax.stop_gradient(self.sums[...] / counts[..., None])

    def count(self, keys: jax.Array, codes: jax.Array, mask: jax.Array | None) -> None:
        """Add the keys of this micro-batch to the step's statistics; ``mask`` is (B, T)."""
        size = self.counts[...].shape[-1]
        if mask is not None:
            codes = jnp.where(mask[..., None] > 0, codes, size)
        sums, counts = sum_by_code(lax.stop_gradient(keys), codes, size)
        self.new_sums.set_value(self.new_sums[...] + sums)
        self.new_counts.set_value(self.new_counts[...] + counts)


def quantize(keys: jax.Array, rows: jax.Array) -> QuantizedKeys:
    """Replace float32 ``keys`` (B, T, Hk, K) by their nearest ``rows`` (Hk, S, K).

    The nearest row has the largest k.c - |c|^2 / 2. The products run in full precision wherever
    they run: a code that flips changes more than a rounding.
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
    # In this order the value is the codebook's to the last bit.
    return QuantizedKeys(nearest + (keys - lax.stop_gradient(keys)), codes, errors)


def sum_by_code(values: jax.Array, codes: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Sum ``values`` (B, T, H, F) by ``codes`` (B, T, H): (H, S, F) and counts (H, S), float32.

    Codes from ``size`` on belong to nothing.
    """
    heads, width = values.shape[-2:]
    # Not in one row: where the tokens are cut over devices that would bring them all together.
    places = jnp.where(codes < size, codes + size * jnp.arange(heads), heads * size)
    found = values.astype(jnp.float32)
    sums = jnp.zeros((heads * size, width)).at[places].add(found, mode="drop")
    counts = jnp.zeros(heads * size).at[places].add(1.0, mode="drop")
    return sums.reshape(heads, size, width), counts.reshape(heads, size)


def update_codebooks(tree: Mapping[str, Any], decay: float) -> dict[str, Any]:
    """Apply one moving average to every codebook in a collection, once an optimizer step."""
    if "new_sums" not in tree:
        return {name: update_codebooks(part, decay) for name, part in tree.items()}
    moved = {
        name: decay * tree[name] + (1.0 - decay) * tree[f"new_{name}"]
        for name in ("sums", "counts")
    }
    return moved | {f"new_{name}": jnp.zeros_like(leaf) for name, leaf in moved.items()}


def perplexities(tree: Mapping[str, Any]) -> list[jax.Array]:
    """Return for each codebook how many codes its averaged counts amount to: exp(entropy)."""
    if "counts" not in tree:
        return [value for part in tree.values() for value in perplexities(part)]
    shares = tree["counts"] / jnp.maximum(tree["counts"].sum(-1, keepdims=True), 1e-30)
    entropy = -jnp.where(shares > 0, shares * jnp.log(jnp.maximum(shares, 1e-30)), 0.0).sum(-1)
    return [jnp.exp(entropy).mean()]
