"""Pooling of token vectors, and other operations on vectors in a model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

#: Pooling modes and their keys in old files. If an old file has several modes, their results are
#: concatenated in this order.
POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pool(hidden: jax.Array, mask: jax.Array, modes: Sequence[str]) -> jax.Array:
    """Pools hidden states over the tokens of each sentence.

    Args:
        hidden: Hidden states, `(batch, tokens, features)`.
        mask: Mask of the pooled tokens, `(batch, tokens)`. Padding must be on the right. The tokens
            of a prompt may be masked too. If all tokens of a row are masked, ``max`` returns minus
            infinity, ``cls`` the first token, and the other modes 0, as in sentence-transformers.
        modes: Keys of ``POOLING_MODES``. Their results are concatenated.

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
            if mode == "weightedmean":  # later tokens have larger weights
                mode_weights = weights * jnp.arange(1, hidden.shape[1] + 1)[:, None]
            count = jnp.maximum(mode_weights.sum(axis=1), 1e-9)
            divisor = jnp.sqrt(count) if mode == "mean_sqrt_len" else count
            pooled.append((hidden * mode_weights).sum(axis=1) / divisor)
    return jnp.concatenate(pooled, axis=-1)


def _take_token(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns one token per row, `(batch, features)`, from its position, `(batch,)`."""
    return jnp.take_along_axis(hidden, positions[:, None, None], axis=1)[:, 0]


def l2_normalize(vectors: jax.Array) -> jax.Array:
    """Scales vectors to length 1. Zero vectors stay zero, and have finite gradients."""
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squares, 1e-24))
