"""Drawing tokens: every row has a key of its own, so it does not depend on its neighbours."""

from __future__ import annotations

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
    """Draw a token for each row of ``scores`` (rows, vocabulary) from their softmax."""
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def sample_without_replacement(
    keys: jax.Array, scores: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Draw ``count`` different places in each row: (rows, count) scores and places.

    The Gumbel-top-k trick (Kool et al., 2019): the largest perturbed scores are such a sample.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    places = jax.lax.top_k(scores + noise, count)[1]
    return jnp.take_along_axis(scores, places, axis=1), places
