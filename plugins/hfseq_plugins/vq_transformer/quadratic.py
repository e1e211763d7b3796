"""Attention with all pairs of tokens: over keys as they are, or over those of the codebook."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.vq_transformer.positions import EXACT, shift_right
from hfseq_plugins.vq_transformer.tape import LOWEST, How, Inputs, Terms


def attend_to_all(
    inputs: Inputs, terms: Terms, how: How, lengths: jax.Array | None, *, quantised: bool
) -> jax.Array:
    """Return the values attended to, (B, Hk, G, T, V) float32, by softmax over all earlier keys.

    ``terms.relative`` has a row for each distance that has a position. ``quantised`` keys have
    gradients exactly where the evaluation in blocks of ``how.block`` gives them.
    """
    tokens = inputs.code.shape[-1]
    content = inputs.query + terms.content
    if quantised:
        exact = _exact(tokens, how)
        scores = _gradient_where(exact, content, inputs.key)
    else:
        exact = None
        scores = jnp.einsum("bhglk,bhck->bhglc", content, inputs.key, precision=EXACT)
    scores += _position_scores(inputs.query + terms.position, terms.relative, tokens)
    seen = _seen(inputs, lengths, tokens)
    if quantised and not how.compressive:
        places = jnp.arange(tokens)
        seen &= places[:, None] - places <= how.window
    weights = jax.nn.softmax(jnp.where(seen, scores, LOWEST), axis=-1)
    if exact is not None and how.stop_gradient:
        return _values(weights * exact, inputs.value) + _values(
            weights * ~exact, lax.stop_gradient(inputs.value)
        )
    return _values(weights, inputs.value)


def _values(weights: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bhglc,bhcv->bhglv", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )


def _exact(tokens: int, how: How) -> jax.Array:
    """Tell which keys a query's block sees one by one, (T, T)."""
    places = jnp.arange(tokens)
    starts = places - places % how.block
    return places >= (starts - (0 if how.stop_gradient else how.window))[:, None]


def _gradient_where(exact: jax.Array, content: jax.Array, key: jax.Array) -> jax.Array:
    """Score all keys; only the ``exact`` ones get a gradient."""
    fixed = lax.stop_gradient(key)
    scores = jnp.einsum("bhglk,bhck->bhglc", content, fixed, precision=EXACT)
    nothing = jnp.einsum(
        "bhglk,bhck->bhglc", lax.stop_gradient(content), key - fixed, precision=EXACT
    )
    return scores + jnp.where(exact, nothing, 0.0)


def _position_scores(query: jax.Array, rows: jax.Array, tokens: int) -> jax.Array:
    """Score the distances 0 to len(rows) - 1 of all pairs, (B, Hk, G, T, T)."""
    reach = min(len(rows), tokens)
    rows = rows[:reach][::-1]
    scores = shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows, precision=EXACT))
    return scores[..., reach - 1 : reach - 1 + tokens]


def _seen(inputs: Inputs, lengths: jax.Array | None, tokens: int) -> jax.Array:
    places = jnp.arange(tokens)
    seen = (places[:, None] >= places)[None]
    if lengths is not None:
        seen = seen & (places < lengths[:, None])[:, None]
    if inputs.segment is not None:
        seen = seen & (inputs.segment[:, :, None] == inputs.segment[:, None])
    return seen[:, None, None]
