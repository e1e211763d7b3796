"""What is done on CPUs alone: attention in pieces that fit their caches, few queries, top-k."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn.layers import drop
from hfseq.nn.random import Drawn


def one_cpu() -> bool:
    """Tell whether the only device is a CPU: then work may be cut so that caches hold a piece.

    Elsewhere passes over memory are fused, and rows that lie on several devices must not be cut
    otherwise.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def equal_part(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``, at least 1: what to take at once."""
    return next(part for part in range(max(min(most, size), 1), 0, -1) if size % part == 0)


def first_maximum(x: jax.Array, top: jax.Array | None = None) -> jax.Array:
    """Return ``argmax(x, -1)`` as int32; ``top`` is ``x.max(-1)`` where it is known already.

    A reduction over pairs (value, place), as argmax is, is not vectorised on a CPU; two plain ones
    are. A row with NaN gives its last place.
    """
    top = x.max(-1) if top is None else top
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == top[..., None], places, x.shape[-1] - 1).min(-1)


def batched_dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract an axis of each, in every entry of their first axis, with sums in float32."""
    dimensions = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


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


#: Sizes of a block: smaller ones leave too many maxima, larger ones too many tokens to look at.
SMALLEST, LARGEST = 4, 128


def block_width(size: int) -> int | None:
    """Return the largest block that divides a vocabulary of ``size``; ``None`` if there is none."""
    widths = range(min(LARGEST, size // 4), SMALLEST - 1, -1)
    return next((width for width in widths if size % width == 0), None)


def in_blocks(values: jax.Array, width: int) -> jax.Array:
    """Return (rows, blocks, width) of ``values`` (rows, size)."""
    return values.reshape(len(values), -1, width)


def block_maxima(values: jax.Array, width: int) -> jax.Array:
    """Return the maximum of each block, (rows, blocks), of ``values`` (rows, size)."""
    return in_blocks(values, width).max(-1)


def log_softmax_parts(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what ``log_softmax`` subtracts from logits (rows, size), and the maxima of blocks.

    The maximum and the logarithm of the summed exponentials, (rows, 1) each, to be subtracted in
    this order; then (rows, blocks).
    """

    def parts(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        maxima = block_maxima(rows, width)
        top = maxima.max(-1, keepdims=True)
        return top, jnp.log(jnp.exp(rows - top).sum(-1, keepdims=True)), maxima

    few = equal_part(len(logits), 8)
    if jax.default_backend() != "cpu" or few == len(logits):
        return parts(logits)
    # A few rows at a time stay in the cache; exponentials of all take five times as long.
    found = jax.lax.map(parts, logits.reshape(-1, few, logits.shape[-1]))
    return jax.tree.map(lambda leaf: leaf.reshape(len(logits), -1), found)


def changed_blocks(processors: Sequence[Any], size: int, width: int) -> np.ndarray | None:
    """Return the blocks with tokens that ``processors`` may change; ``None`` if that can be any.

    Numbers of blocks, ascending. ``size`` is that of the vocabulary.
    """
    found: set[int] = set()
    for processor in processors:
        touched = getattr(processor, "touched", lambda: None)()
        if touched is None:
            return None
        found |= {token // width for token in touched if token < size}
    # Looking at each anew would be no less work than at all.
    return None if 4 * len(found) > size // width else np.asarray(sorted(found), np.int32)


def maxima_of_processed(
    processors: Sequence[Any],
    before: jax.Array,
    scores: jax.Array,
    length: Any,
    changed: np.ndarray,
) -> jax.Array:
    """Return the maxima (rows, blocks) of ``scores`` (rows, size), which ``processors`` returned.

    ``before`` are those of what they were given. Only the blocks ``changed`` are looked at again.
    """
    maxima = before
    for processor in processors:
        maxima = jnp.where(processor.forces(length), -jnp.inf, maxima)
    if not changed.size:
        return maxima
    width = scores.shape[-1] // before.shape[-1]
    return maxima.at[:, changed].set(in_blocks(scores, width)[:, changed].max(-1))


def top_k(
    values: jax.Array, count: int, maxima: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return what ``lax.top_k(values, count)`` returns: of equals the first, (rows, count) each.

    ``maxima`` (rows, blocks) are those of the blocks of ``values`` (rows, size), if known.
    """
    if maxima is None:
        width = block_width(values.shape[-1])
        if width is None or values.shape[-1] < 8 * count * width:
            return jax.lax.top_k(values, count)
        maxima = block_maxima(values, width)
    width = values.shape[-1] // maxima.shape[-1]
    # In their order, so that of equal values the first one comes first here too.
    chosen = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[-1]))[1], axis=-1)
    few = _pick_blocks(values, chosen, width)
    best, places = jax.lax.top_k(few.reshape(len(values), -1), count)
    blocks = jnp.take_along_axis(chosen, places // width, axis=1)
    return best, blocks * width + places % width


def first_best(values: jax.Array, maxima: jax.Array) -> jax.Array:
    """Return ``argmax(values, -1)`` as int32; arguments as in :func:`top_k`."""
    width = values.shape[-1] // maxima.shape[-1]
    chosen = first_maximum(maxima)[:, None]
    return chosen[:, 0] * width + first_maximum(_pick_blocks(values, chosen, width)[:, 0])


def _pick_blocks(values: jax.Array, blocks: jax.Array, width: int) -> jax.Array:
    """Return (rows, picks, width) of ``values`` (rows, size)."""
    wide = in_blocks(values, width)
    return jnp.take_along_axis(wide, blocks[:, :, None], axis=1, mode="clip")


def suits(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, bias: Any) -> bool:
    """Tell whether :func:`direct_attention` takes these, (batch, length, heads, head_dim)."""
    plain = all(x.ndim == 4 and x.dtype == jnp.float32 for x in (query, key, value))
    return (
        plain
        and query.shape[2] == key.shape[2]
        and all(x is None or x.ndim == 4 for x in (mask, bias))
        and one_cpu()
    )


def direct_attention(
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
    """Attend as :func:`hfseq.nn.attend` does, which has the arguments; see :func:`suits`.

    ``drawn`` are the random bits of all weights, of which ``rate`` are dropped.
    """
    if causal:
        queries, keys = query.shape[1], key.shape[1]
        below = jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
        mask = below[None, None] if mask is None else mask & below
    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
    bits = None if drawn is None else drawn.all()
    return _attend(scale, rate, *heads_first, mask, bias, bits).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    scale: float, rate: float, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any,
    bits: Any,
) -> jax.Array:  # fmt: skip
    """Attend with heads before positions; all weights are (batch, heads, queries, keys)."""
    return _forward(scale, rate, q, k, v, mask, bias, bits)[0]


def _forward(
    scale: float, rate: float, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any,
    bits: Any,
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    scores = _dot(q, k, (3, 3)) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = _dot(_dropped(weights, rate, bits), v, (3, 2))
    return mixed, (q, k, v, mask, bias, bits, weights)


def _backward(scale: float, rate: float, saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    q, k, v, mask, bias, bits, weights = saved
    dv = _dot(_dropped(weights, rate, bits), g, (2, 2))
    change = _dropped(_dot(g, v, (3, 3)), rate, bits)
    change = weights * (change - (weights * change).sum(-1, keepdims=True))
    if mask is not None:  # a row that sees nothing has weights all the same
        change = jnp.where(mask, change, 0.0)
    dbias = None if bias is None else _sum_to(change, bias)
    change = change * scale
    return _dot(change, k, (3, 2)), _dot(change, q, (2, 2)), dv, None, dbias, None


_attend.defvjp(_forward, _backward)


def _dropped(x: jax.Array, rate: float, bits: jax.Array | None) -> jax.Array:
    return x if bits is None else drop(x, rate, bits)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract an axis of each, in every row and head."""
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0, 1), (0, 1))))


def _sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over the axes along which ``like`` was repeated."""
    axes = tuple(axis for axis in range(x.ndim) if like.shape[axis] != x.shape[axis])
    return x.sum(axes, keepdims=True).astype(like.dtype)


def _scale(scale: float | None, query: jax.Array) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _on_one_cpu(query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    """Return the attention that is fastest on one CPU alone, if there is one for these."""
    if worthwhile(query, key, mask, bias):
        return blocked_attention
    return direct_attention if suits(query, key, value, mask, bias) else None


def _is_decoding_on_cpu(query: Any, key: Any, args: Any, kwargs: Any) -> bool:
    few = query.ndim == 4 and query.shape[1] <= 4 < key.shape[1]
    plain = len(args) <= 2 and not kwargs.get("is_causal") and kwargs.keys() <= _PLAIN_OPTIONS
    return few and plain and jax.default_backend() == "cpu"


_PLAIN_OPTIONS = {"bias", "mask", "scale", "is_causal"}


def few_queries_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Attention of a few queries to a long cache, which is read in the order it lies in memory.

    A product per head would transpose the whole cache first (XLA's CPU kernels want heads before
    positions). Here each (query, head) is a column that is zero outside of its head, so one matrix
    product a row of the batch gives all scores: heads times the arithmetic, a fifth of the time.
    """
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    width, group = kv_heads * head_dim, heads // kv_heads
    # A comparison and not a table: it is computed where it is used, not written down.
    own = jnp.arange(heads)[:, None] // group == jnp.arange(kv_heads)[None]
    columns = jnp.where(own[:, :, None], query[:, :, :, None, :], 0)
    scale = _scale(scale, query)
    columns = columns.reshape(batch, queries * heads, width)
    scores = batched_dot(key.reshape(batch, keys, width), columns, (2, 2)) * scale
    scores = scores.reshape(batch, keys, queries, heads)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32).transpose(0, 3, 2, 1)
    if mask is not None:
        scores = jnp.where(mask.transpose(0, 3, 2, 1), scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=1).astype(value.dtype)
    mix = _mix_one if queries == group == 1 else _mix_few
    return mix(weights, value).astype(value.dtype)


def _mix_one(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Mix for one query: one pass over the values, each multiplied once."""
    wide, value = weights.swapaxes(2, 3).astype(jnp.float32), value.astype(jnp.float32)
    return (wide * value).sum(1)[:, None]


def _mix_few(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Mix for several queries: a product gives every head all features; its own are kept."""
    batch, keys, queries, heads = weights.shape
    kv_heads, head_dim = value.shape[2:]
    columns = weights.reshape(batch, keys, queries * heads)
    mixed = batched_dot(columns, value.reshape(batch, keys, -1), (1, 1))
    mixed = mixed.reshape(batch, queries, heads, kv_heads, head_dim)
    # Slices, since a sum over what was masked is computed inside of the next product, slowly.
    own = [mixed[:, :, head, head * kv_heads // heads] for head in range(heads)]
    return jnp.stack(own, axis=2)
