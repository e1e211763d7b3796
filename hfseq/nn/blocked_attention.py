"""Attention a few heads at a time: on a CPU the scores of all heads are larger than its caches.

The explicit form passes over the scores of all rows and heads ten times and more, and keeps them
for the backward pass. Here the scores of a piece are made, used and forgotten while a cache holds
them, and made again going back. The numbers are those of the explicit form, but for the order of
sums; of what a causal attention hides most is never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hfseq.nn.host import equal_part, one_cpu
from hfseq.nn.layers import drop
from hfseq.nn.random import Drawn
from hfseq.nn.reductions import batched_dot

# Scores of a piece, of four bytes each: two mebibytes.
AT_ONCE = 2**19
# Fewer scores than this in all fit into the caches anyway.
WORTHWHILE = 2**20
# Queries of a causal piece: of the keys after its last one nothing is computed.
CAUSAL_QUERIES = 128


class Setting(NamedTuple):
    """What is the same for all pieces: sizes, and dropout of the weights (``drawn`` for all)."""

    queries: int
    keys: int
    wide: int  # heads of queries in a piece
    few: int  # heads of keys and values in a piece
    causal: bool
    scale: float
    rate: float
    drawn: Drawn | None


def worthwhile(query: jax.Array, key: jax.Array, mask: Any, bias: Any) -> bool:
    """Tell whether to attend in pieces, (batch, length, heads, head_dim) being given.

    ``mask`` has to be the same for all heads, ``bias`` the same for all rows.
    """
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    if queries == 1 or batch * heads * queries * keys < WORTHWHILE or not one_cpu():
        return False
    per_row = ((1, queries, keys), (1, 1, keys))
    suits = mask is None or (mask.ndim == 4 and mask.shape[1:] in per_row)
    return suits and (bias is None or bias.shape == (1, heads, queries, keys))


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None,
    bias: jax.Array | None,
    causal: bool,
    scale: float,
    rate: float = 0.0,
    drawn: Drawn | None = None,
) -> jax.Array:
    """Attend as :func:`hfseq.nn.attend` does, which has the arguments; see :func:`worthwhile`.

    ``drawn`` are the random bits of all weights, of which ``rate`` are dropped.
    """
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    most = AT_ONCE // (group * queries * keys)
    few = equal_part(kv_heads, most)
    blocks = kv_heads // few
    setting = Setting(queries, keys, few * group, few, causal, scale, rate, drawn)

    def apart(x: jax.Array) -> jax.Array:  # (blocks, batch, heads of a piece, length, features)
        x = x.reshape(batch, x.shape[1], blocks, -1, x.shape[-1])
        return x.transpose(2, 0, 3, 1, 4)

    def block(given: tuple[Any, ...]) -> jax.Array:
        number, q, k, v, own_bias = given

        def row(given: tuple[Any, ...]) -> jax.Array:
            return _piece(setting, number, own_bias, *given)

        return jax.lax.map(row, (jnp.arange(batch), q, k, v, masks))

    masks = None if mask is None else jnp.broadcast_to(mask[:, 0], (batch, *mask.shape[2:]))
    biases = None if bias is None else bias.reshape(blocks, -1, queries, keys)
    given = jnp.arange(blocks), apart(query), apart(key), apart(value), biases
    mixed = jax.lax.map(block, given)
    return mixed.transpose(1, 3, 0, 2, 4).reshape(batch, queries, heads, head_dim)


def _piece(setting: Setting, *given: Any) -> jax.Array:
    """Attend in a few heads of a row; only the inputs are kept for the way back."""

    @functools.partial(jax.checkpoint, prevent_cse=False)  # inside of a loop nothing is shared
    def attend(*given: Any) -> jax.Array:
        return jnp.concatenate([_mixed(setting, cut, *given) for cut in _cuts(setting)], 1)

    return attend(*given)


def _cuts(setting: Setting) -> Iterator[tuple[int, int, int]]:
    """Cut the queries: where each part begins and ends, and how many keys it can see."""
    step = CAUSAL_QUERIES if setting.causal else setting.queries
    earlier = setting.keys - setting.queries
    for low in range(0, setting.queries, step):
        high = min(low + step, setting.queries)
        yield low, high, max(high + earlier, 1) if setting.causal else setting.keys


def _mixed(
    setting: Setting, cut: tuple[int, int, int], number: Any, bias: Any, row: Any, q: jax.Array,
    k: jax.Array, v: jax.Array, mask: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return (heads, queries of the cut, head_dim)."""
    low, high, seen = cut
    shape = (setting.wide, high - low, seen)
    scores = batched_dot(_grouped(setting, q[:, low:high]), k[:, :seen], (2, 2)) * setting.scale
    scores = scores.reshape(shape)
    if bias is not None:
        scores = scores + bias[:, low:high, :seen].astype(jnp.float32)
    visible = None
    if mask is not None:
        visible = mask[:, :seen] if len(mask) == 1 else mask[low:high, :seen]
    if setting.causal:
        below = jnp.tril(jnp.ones(shape[1:], bool), setting.keys - setting.queries + low)
        visible = below if visible is None else visible & below
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if setting.drawn is not None:
        start = (number * setting.wide * setting.queries + low) * setting.keys
        weights = drop(weights, setting.rate, setting.drawn.part(row, start, shape))
    mixed = batched_dot(_grouped(setting, weights), v[:, :seen], (2, 1))
    return mixed.reshape(setting.wide, high - low, -1).astype(v.dtype)


def _grouped(setting: Setting, x: jax.Array) -> jax.Array:
    """Put the queries of heads that share keys one after the other."""
    return x.reshape(setting.few, -1, x.shape[-1])
