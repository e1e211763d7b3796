"""Attention with all pairs of tokens: over keys as they are, or over those of the codebook."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.vq_transformer.positions import EXACT, shift_right
from hfseq_plugins.vq_transformer.tape import LOWEST, How, Inputs, Terms

_score = functools.partial(jnp.einsum, "bhglk,bhck->bhglc", precision=EXACT)


def attend_to_all(
    inputs: Inputs, terms: Terms, how: How, lengths: jax.Array | None, *, quantised: bool
) -> jax.Array:
    """Return the values attended to, (B, Hk, G, T, V) float32, by softmax over all earlier keys.

    ``terms.relative`` has a row for each distance that has a position. ``quantised`` keys have
    gradients exactly where the evaluation in blocks of ``how.block`` gives them.
    """
    tokens = inputs.code.shape[-1]
    places = jnp.arange(tokens)
    content, key, exact = inputs.query + terms.content, inputs.key, None
    if quantised:
        # Which keys a query's block sees one by one, (T, T): only these get a gradient.
        starts = places - places % how.block
        exact = places >= (starts - (0 if how.stop_gradient else how.window))[:, None]
        fixed = lax.stop_gradient(key)
        scores = _score(content, fixed)
        scores += jnp.where(exact, _score(lax.stop_gradient(content), key - fixed), 0.0)
    else:
        scores = _score(content, key)
    # The distances that have a row, of all pairs: (B, Hk, G, T, T).
    reach = min(len(terms.relative), tokens)
    query, rows = inputs.query + terms.position, terms.relative[:reach][::-1]
    biases = shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows, precision=EXACT))
    scores += biases[..., reach - 1 : reach - 1 + tokens]
    seen = (places[:, None] >= places)[None]
    if lengths is not None:
        seen = seen & (places < lengths[:, None])[:, None]
    if inputs.segment is not None:
        seen = seen & (inputs.segment[:, :, None] == inputs.segment[:, None])
    seen = seen[:, None, None]
    if quantised and not how.compressive:
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
