"""Sinusoids, and the scores of relative positions within the window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

#: Scores are float32 on every device; by default a GPU rounds the factors, and a TPU to bfloat16.
EXACT = lax.Precision.HIGHEST


def sinusoids(positions: jax.Array, width: int, base: float) -> jax.Array:
    """Return (..., width): the sines of all frequencies, then their cosines, float32.

    Frequency n is ``base ** (-2n / width)`` (Vaswani et al., 2017, in two halves).
    """
    frequencies = base ** (-2.0 * jnp.arange(width // 2) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def shift_right(scores: jax.Array) -> jax.Array:
    """Move row l of the last two axes l places to the right: (..., L, W) to (..., L, W + L - 1).

    What is uncovered is 0. Done by reshaping rows that are one too long: indices would make the
    gradient a slow scatter.
    """
    *lead, rows, width = scores.shape
    wide = width + rows
    padded = jnp.pad(scores, [(0, 0)] * len(lead) + [(0, 0), (0, rows)])
    flat = padded.reshape(*lead, rows * wide)[..., : rows * (wide - 1)]
    return flat.reshape(*lead, rows, wide - 1)


def window_scores(query: jax.Array, rows: jax.Array) -> jax.Array:
    """Score the positions of a block's keys: (B, Hk, G, L, K) and (M + 1, Hk, K).

    ``rows[d]`` stands for distance d. Returns (B, Hk, G, L, M + L): column c is the key M places
    before the block's first token, plus c; 0 where the distance is not 0 to M.
    """
    return shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows[::-1], precision=EXACT))
