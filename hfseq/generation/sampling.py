"""Drawing tokens: every row has a key of its own, so it does not depend on its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def make_key(key: Any) -> jax.Array:
    """Return a PRNG key: 0 by default, of a seed, or the key that was given."""
    if key is None:
        return jax.random.PRNGKey(0)
    return jax.random.PRNGKey(key) if hasattr(key, "__index__") and not _is_key(key) else key


def _is_key(key: Any) -> bool:
    return getattr(key, "ndim", 0) > 0 or jnp.issubdtype(
        getattr(key, "dtype", jnp.int32), jax.dtypes.prng_key
    )


def row_keys(key: jax.Array, rows: int, step: Any) -> jax.Array:
    """Return a key for each row at this step."""
    at_step = jax.random.fold_in(key, step)
    return jax.vmap(jax.random.fold_in, (None, 0))(at_step, jnp.arange(rows))


def sample(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw a token for each row of ``scores`` (rows, vocabulary) from their softmax.

    Two numbers a row instead of one for each token: the first picks a chunk of the vocabulary by
    its mass, the second a token in it.
    """
    rows, size = scores.shape
    width = math.isqrt(size - 1) + 1
    wide = jnp.pad(scores, ((0, 0), (0, -size % width)), constant_values=-jnp.inf)
    mass = jnp.exp(wide - wide.max(-1, keepdims=True)).reshape(rows, -1, width)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    chunk = _pick(uniform[:, 0], mass.sum(-1))
    place = _pick(uniform[:, 1], jnp.take_along_axis(mass, chunk[:, None, None], axis=1)[:, 0])
    return (chunk * width + place).astype(jnp.int32)


def _pick(uniform: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the place in each row of ``weights`` (rows, n) that a number in [0, 1) falls on."""
    total = jnp.cumsum(weights, axis=-1)
    places = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
    return jnp.minimum(places, weights.shape[-1] - 1)


def sample_top_k(
    keys: jax.Array, scores: jax.Array, k: int, warpers: Sequence[Callable[..., jax.Array]]
) -> jax.Array:
    """Draw from the ``k`` highest scores of each row, filtered by ``warpers``.

    Filters look at ``k`` numbers instead of the vocabulary. Of scores equal to the ``k``-th only as
    many as fit are candidates, where :class:`FlaxTopKLogitsWarper` keeps all.
    """
    best, tokens = jax.lax.top_k(scores, min(k, scores.shape[-1]))
    for warper in warpers:
        best = warper(None, best, None)
    places = sample(keys, best)[:, None]
    return jnp.take_along_axis(tokens, places, axis=1)[:, 0].astype(jnp.int32)


def sample_without_replacement(
    keys: jax.Array, scores: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Draw ``count`` different places in each row: (rows, count) scores and places.

    The Gumbel-top-k trick (Kool et al., 2019): the largest perturbed scores are such a sample.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    places = jax.lax.top_k(scores + noise, count)[1]
    return jnp.take_along_axis(scores, places, axis=1), places
