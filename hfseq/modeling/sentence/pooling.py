"""Pooling and normalization of vectors in JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

#: The key of each pooling mode in files of sentence-transformers before version 6. If such a file
#: enables several modes, their results are concatenated in this order.
POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pool(hidden: jax.Array, mask: jax.Array, modes: Sequence[str]) -> jax.Array:
    """Pools hidden states over the tokens of each text.

    As in sentence-transformers, the result for a row without pooled tokens depends on the mode: it
    is minus infinity for ``max``, the first token for ``cls``, and 0 for the others.

    Args:
        hidden: Hidden states, `(batch, tokens, features)`.
        mask: Mask of the tokens to pool, `(batch, tokens)`. Padding must be on the right. The
            tokens of a prompt can be excluded too.
        modes: Keys of ``POOLING_MODES``. The results of several modes are concatenated.

    Returns:
        Float32 vectors, `(batch, number of modes * features)`.
    """
    hidden = hidden.astype(jnp.float32)
    weights = mask.astype(jnp.float32)[..., None]
    pooled = []
    for mode in modes:
        if mode == "cls":
            pooled.append(_take_token(hidden, jnp.argmax(mask != 0, axis=1)))
        elif mode == "max":
            pooled.append(jnp.where(weights > 0, hidden, -jnp.inf).max(axis=1))
        elif mode == "lasttoken":
            last = hidden.shape[1] - 1 - jnp.argmax(mask[:, ::-1] != 0, axis=1)
            pooled.append(_take_token(hidden * weights, last))
        else:
            mode_weights = weights
            if mode == "weightedmean":  # the weight of a token grows with its position
                mode_weights = weights * jnp.arange(1, hidden.shape[1] + 1)[:, None]
            count = jnp.maximum(mode_weights.sum(axis=1), 1e-9)
            divisor = jnp.sqrt(count) if mode == "mean_sqrt_len" else count
            pooled.append((hidden * mode_weights).sum(axis=1) / divisor)
    return jnp.concatenate(pooled, axis=-1)


def _take_token(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns one token per row, `(batch, features)`, from its position, `(batch,)`."""
    return jnp.take_along_axis(hidden, positions[:, None, None], axis=1)[:, 0]


def l2_normalize(vectors: jax.Array) -> jax.Array:
    """Scales vectors to length 1. Zero vectors stay zero, and their gradients are finite."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squares, 1e-24))
