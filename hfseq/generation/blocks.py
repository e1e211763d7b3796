"""The best of a large vocabulary, found by the maxima of its blocks.

Sorting or scanning all scores takes longer than the product that makes them. The maximum of every
block of neighbouring tokens is one fast reduction, and ``count`` blocks hold the ``count`` best
tokens: a token outside of them has a better one, or an equal one before it, in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn.host import equal_part
from hfseq.nn.reductions import first_maximum

#: Sizes of a block: smaller ones leave too many maxima, larger ones too many tokens to look at.
SMALLEST, LARGEST = 4, 128


def block_width(size: int) -> int | None:
    """Return the largest block that divides a vocabulary of ``size``; ``None`` if there is none."""
    widths = range(min(LARGEST, size // 4), SMALLEST - 1, -1)
    return next((width for width in widths if size % width == 0), None)


def in_blocks(values: jax.Array, width: int) -> jax.Array:
    """Return (rows, blocks, width) of ``values`` (rows, size)."""
    return values.reshape(len(values), -1, width)


def block_maxima(values: jax.Array, width: int) -> jax.Array:
    """Return the maximum of each block, (rows, blocks), of ``values`` (rows, size)."""
    return in_blocks(values, width).max(-1)


def log_softmax_parts(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what ``log_softmax`` subtracts from logits (rows, size), and the maxima of blocks.

    The maximum and the logarithm of the summed exponentials, (rows, 1) each, to be subtracted in
    this order; then (rows, blocks).
    """

    def parts(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        maxima = block_maxima(rows, width)
        top = maxima.max(-1, keepdims=True)
        return top, jnp.log(jnp.exp(rows - top).sum(-1, keepdims=True)), maxima

    few = equal_part(len(logits), 8)
    if jax.default_backend() != "cpu" or few == len(logits):
        return parts(logits)
    # A few rows at a time stay in the cache; exponentials of all take five times as long.
    found = jax.lax.map(parts, logits.reshape(-1, few, logits.shape[-1]))
    return jax.tree.map(lambda leaf: leaf.reshape(len(logits), -1), found)


def changed_blocks(processors: Sequence[Any], size: int, width: int) -> np.ndarray | None:
    """Return the blocks with tokens that ``processors`` may change; ``None`` if that can be any.

    Numbers of blocks, ascending. ``size`` is that of the vocabulary.
    """
    found: set[int] = set()
    for processor in processors:
        touched = getattr(processor, "touched", lambda: None)()
        if touched is None:
            return None
        found |= {token // width for token in touched if token < size}
    # Looking at each anew would be no less work than at all.
    return None if 4 * len(found) > size // width else np.asarray(sorted(found), np.int32)


def maxima_of_processed(
    processors: Sequence[Any],
    before: jax.Array,
    scores: jax.Array,
    length: Any,
    changed: np.ndarray,
) -> jax.Array:
    """Return the maxima (rows, blocks) of ``scores`` (rows, size), which ``processors`` returned.

    ``before`` are those of what they were given. Only the blocks ``changed`` are looked at again.
    """
    maxima = before
    for processor in processors:
        maxima = jnp.where(processor.forces(length), -jnp.inf, maxima)
    if not changed.size:
        return maxima
    width = scores.shape[-1] // before.shape[-1]
    return maxima.at[:, changed].set(in_blocks(scores, width)[:, changed].max(-1))


def top_k(
    values: jax.Array, count: int, maxima: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return what ``lax.top_k(values, count)`` returns: of equals the first, (rows, count) each.

    ``maxima`` (rows, blocks) are those of the blocks of ``values`` (rows, size), if known.
    """
    if maxima is None:
        width = block_width(values.shape[-1])
        if width is None or values.shape[-1] < 8 * count * width:
            return jax.lax.top_k(values, count)
        maxima = block_maxima(values, width)
    width = values.shape[-1] // maxima.shape[-1]
    # In their order, so that of equal values the first one comes first here too.
    chosen = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[-1]))[1], axis=-1)
    few = _pick_blocks(values, chosen, width)
    best, places = jax.lax.top_k(few.reshape(len(values), -1), count)
    blocks = jnp.take_along_axis(chosen, places // width, axis=1)
    return best, blocks * width + places % width


def first_best(values: jax.Array, maxima: jax.Array) -> jax.Array:
    """Return ``argmax(values, -1)`` as int32; arguments as in :func:`top_k`."""
    width = values.shape[-1] // maxima.shape[-1]
    chosen = first_maximum(maxima)[:, None]
    return chosen[:, 0] * width + first_maximum(_pick_blocks(values, chosen, width)[:, 0])


def _pick_blocks(values: jax.Array, blocks: jax.Array, width: int) -> jax.Array:
    """Return (rows, picks, width) of ``values`` (rows, size)."""
    wide = in_blocks(values, width)
    return jnp.take_along_axis(wide, blocks[:, :, None], axis=1, mode="clip")
