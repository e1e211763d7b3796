"""Attention over a window of tokens and a cache of codes: of one token, many, or rows on a mesh.

And attention with all pairs of tokens: over keys as they are, or over those of the codebook.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.vq_transformer import parallel, sequence
from hfseq_plugins.vq_transformer.positions import EXACT, shift_right
from hfseq_plugins.vq_transformer.state import State, take
from hfseq_plugins.vq_transformer.tape import LOWEST, How, Inputs, Terms, cache_scores, weigh


def attend(
    inputs: Inputs, terms: Terms, how: How, state: State | None, lengths: jax.Array | None
) -> tuple[jax.Array, State | None]:
    """Return the values attended to, (B, Hk, G, T, V) float32, and the state after the call.

    ``lengths`` (B,) is how many tokens of each row are real, the others being at its end; None if
    all are. Without a ``state`` the text begins here, and none is returned.
    """
    if state is not None and inputs.code.shape[-1] == 1:
        return step(inputs, terms, how, state)
    mesh = sequence.mesh_for(inputs.code.shape[-1], how.block)
    if mesh is not None:
        return sequence.attend(mesh, inputs, terms, how, state, lengths)
    return parallel.attend_here(inputs, terms, how, state, lengths)


_dot = functools.partial(jnp.einsum, precision=EXACT)


def step(inputs: Inputs, terms: Terms, how: How, state: State) -> tuple[jax.Array, State]:
    """Attend with one token, and let it into the ring for the oldest, which joins the cache.

    Returns (B, Hk, G, 1, V) float32 and the new state. Tokens that are none change nothing. The
    cost is that of M + S keys, however long the text is.
    """
    codes, window = terms.codebook.shape[1], how.window
    if how.stop_gradient:
        state = State(*map(lax.stop_gradient, state))
    real = inputs.code[:, 0, 0] < codes
    content = inputs.query + terms.content
    waves, projection = terms.relative
    biases = _dot("bhglk,dhk->bhgld", inputs.query + terms.position, projection)
    biases = _dot("bhglk,dk->bhgld", biases, waves)
    # The slots are 1 to M places behind the token, which will replace the last of them.
    behind = (state.position[:, None] - 1 - jnp.arange(window)) % max(window, 1) + 1
    near = _dot("bhglk,bhck->bhglc", content, state.window_key)
    near += jnp.take_along_axis(biases, behind[:, None, None, None], axis=-1, mode="clip")
    near = jnp.where(state.window_code[:, :1, None, None] < codes, near, LOWEST)
    own = _dot("bhglk,bhck->bhglc", content, inputs.key) + biases[..., :1]
    groups = [(own, inputs.value), (near, state.window_value)]
    if how.compressive:
        groups.append((cache_scores(content, state.cache_count, terms.codebook), state.cache_mean))
    # One softmax over all groups; a window of nothing has none.
    groups = [group for group in groups if group[0].shape[-1]]
    top = functools.reduce(jnp.maximum, (score.max(-1, keepdims=True) for score, _ in groups))
    weights = [jnp.exp(score - top) for score, _ in groups]
    total = sum(weight.sum(-1, keepdims=True) for weight in weights)
    parts = [
        weigh(weight / total, value, inputs.value.dtype)
        for weight, (_, value) in zip(weights, groups, strict=True)
    ]
    out = sum(parts[1:], parts[0])
    return out, _advance(inputs, state, real, codes, _zero(out))


def _advance(inputs: Inputs, state: State, real: jax.Array, codes: int, after: jax.Array) -> State:
    """Put real tokens in their slots, and what was there into the cache.

    ``after`` is 0, but known only when everything was read: XLA copies whole rings and caches
    unless each write depends on all that reads what was there before.
    """
    window, rows = state.window_code.shape[-1], jnp.arange(len(real))
    slot = state.position % max(window, 1)
    value, code = inputs.value, inputs.code
    if window:
        value = take(state.window_value, slot[:, None])
        code = take(state.window_code, slot[:, None])
    code = jnp.where(real[:, None], code[..., 0], codes)
    at = (rows[:, None], jnp.arange(code.shape[1])[None], code)
    count = state.cache_count.at[at].get(mode="fill", fill_value=0) + 1
    mean = state.cache_mean.at[at].get(mode="fill", fill_value=0.0)
    mean = mean + (value[:, :, 0].astype(jnp.float32) - mean) / count[..., None]
    place = (rows[:, None], at[1], code + after)
    means = state.cache_mean.at[place].set(mean, mode="drop")
    counts = state.cache_count.at[place].set(count, mode="drop")
    slot = jnp.where(real, slot, window) + _zero(means) + _zero(counts)

    def put(ring: jax.Array, new: jax.Array) -> jax.Array:
        if not window:
            return ring
        return ring.at[rows, :, slot].set(new[:, :, 0].astype(ring.dtype), mode="drop")

    return State(
        put(state.window_key, inputs.key),
        put(state.window_value, inputs.value),
        put(state.window_code, inputs.code),
        means,
        counts,
        state.position + real,
    )


def _zero(x: jax.Array) -> jax.Array:
    """Return an int32 0 that the compiler takes for something that depends on ``x``."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    return ((first > 3e38) & (first < -3e38)).astype(jnp.int32)


# -- all pairs of tokens
# ---------------------------------------------------------------------------------------


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
