"""Sinusoids, and scores of relative positions within the window.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

#: Precision of scores. By default, GPUs and TPUs round the inputs of float32 multiplications.
EXACT = lax.Precision.HIGHEST


def sinusoids(positions: jax.Array, width: int, base: float) -> jax.Array:
    """Returns sinusoids (Vaswani et al., 2017). The sines precede the cosines.

    Args:
        positions: Positions, `(...)`.
        width: Number of features.
        base: Base of the frequencies. Frequency n is `base ** (-2 * n / width)`.

    Returns:
        Float32 array, `(..., width)`.
    """
    frequencies = base ** (-2.0 * jnp.arange(width // 2) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def shift_right(scores: jax.Array) -> jax.Array:
    """Shifts row l of a matrix by l columns to the right, and fills with 0.

    The shape changes from `(..., L, W)` to `(..., L, W + L - 1)`. The implementation pads and
    reshapes, because the gradient of indexing would be a slow scatter.
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
        rows: Key vectors of the distances 0 to M, `(M + 1, Hk, K)`.

    Returns:
        Scores, `(B, Hk, G, L, M + L)`. Column c belongs to the key that is M - c tokens before the
        start of the block. The score is 0 for distances outside of 0 to M.
    """
    return shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows[::-1], precision=EXACT))
