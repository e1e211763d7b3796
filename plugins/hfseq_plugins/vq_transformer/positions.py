"""Sinusoids, and scores of relative positions within the window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

#: Computes scores in float32 on every device. By default GPUs and TPUs round the factors.
EXACT = lax.Precision.HIGHEST


def sinusoids(positions: jax.Array, width: int, base: float) -> jax.Array:
    """Returns sinusoids of positions `(...)`: float32 `(..., width)`, sines and then cosines.

    Frequency n is `base ** (-2 * n / width)` (Vaswani et al., 2017).
    """
    frequencies = base ** (-2.0 * jnp.arange(width // 2) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def shift_right(scores: jax.Array) -> jax.Array:
    """Shifts row l by l columns to the right: `(..., L, W)` to `(..., L, W + L - 1)`.

    New entries are 0. The shift is a reshape of rows with one extra column, since the gradient of
    indexing is a slow scatter.
    """
    *lead, rows, width = scores.shape
    wide = width + rows
    padded = jnp.pad(scores, [(0, 0)] * len(lead) + [(0, 0), (0, rows)])
    flat = padded.reshape(*lead, rows * wide)[..., : rows * (wide - 1)]
    return flat.reshape(*lead, rows, wide - 1)


def window_scores(query: jax.Array, rows: jax.Array) -> jax.Array:
    """Computes the position scores of a block and its window.

    Args:
        query: Queries of the block, `(B, Hk, G, L, K)`.
        rows: Keys of the distances 0 to M, `(M + 1, Hk, K)`.

    Returns:
        Scores, `(B, Hk, G, L, M + L)`. Column c belongs to the key at M - c tokens before the start
        of the block. 0 for distances outside of 0 to M.
    """
    return shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows[::-1], precision=EXACT))
