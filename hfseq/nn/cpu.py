"""What is done on CPUs alone: attention in pieces that fit their caches, few queries, top-k."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hfseq.nn.context import platform
from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import LazyBits
from hfseq.nn.scores import batched_dot, softmax_weights
from hfseq.nn.visible import Visibility


def is_single_cpu() -> bool:
    """Tell whether the only device is a CPU: then work may be cut so that caches hold a piece.

    Elsewhere passes over memory are fused, and rows that lie on several devices must not be cut
    otherwise.
    """
    return platform() == "cpu" and jax.device_count() == 1


#: Tokens of a forward pass whose activations fit into the caches.
CHUNK_TOKENS = 2048


def rows_per_chunk(width: int, most: int) -> int:
    """Return how many rows of a forward pass go together: ``most``; fewer long ones on a CPU."""
    return min(most, max(1, CHUNK_TOKENS // width)) if is_single_cpu() else most


def largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``, at least 1: what to take at once."""
    return next(part for part in range(max(min(most, size), 1), 0, -1) if size % part == 0)


def fast_argmax(x: jax.Array, top: jax.Array | None = None) -> jax.Array:
    """Return ``argmax(x, -1)`` as int32; ``top`` is ``x.max(-1)`` where it is known already.

    A reduction over pairs (value, index), as argmax is, is not vectorised on a CPU; two plain ones
    are. A row with NaN gives its last index.
    """
    top = x.max(-1) if top is None else top
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == top[..., None], indices, x.shape[-1] - 1).min(-1)


# -- attention
# ---------------------------------------------------------------------------------------

# Scores of a piece, of four bytes each: two mebibytes.
BLOCK_SCORES = 2**19

# Fewer scores than this in all fit into the caches anyway.
MIN_BLOCKED_SCORES = 2**20

# Queries of a causal piece: of the keys after its last one nothing is computed.
CAUSAL_BLOCK_QUERIES = 128


def blocked_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Say why not to attend in pieces.

    A mask has to be the same for all heads, a bias the same for all rows.
    """
    scores = facts.batch * facts.heads * facts.queries * facts.keys
    if facts.queries == 1 or scores < MIN_BLOCKED_SCORES:
        return "its few scores fit into the caches anyway"
    if facts.platform != "cpu" or facts.devices > 1:
        return "it is for one CPU alone"
    per_row = ((1, facts.queries, facts.keys), (1, 1, facts.keys))
    if facts.mask is not None and facts.mask[1:] not in per_row:
        return f"it needs a mask for all heads alike, of {per_row[0]}, and got {facts.mask}"
    whole = (1, facts.heads, facts.queries, facts.keys)
    if facts.bias is not None and facts.bias != whole:
        return f"it needs a bias of {whole}, and got {facts.bias}"
    return None


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend in a few heads of a row at a time, and in a few queries where it is causal."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    few = largest_divisor(
        kv_heads, BLOCK_SCORES // (group * queries * keys)
    )  # heads of keys in a piece
    blocks, wide = kv_heads // few, few * group
    step = CAUSAL_BLOCK_QUERIES if visible.causal else queries

    # Only the inputs are kept for the backward pass; inside of a loop nothing is shared.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def piece(
        number: jax.Array,
        bias: jax.Array | None,
        row: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        shown: Visibility,
    ) -> jax.Array:
        shown = jax.tree.map(lambda leaf: leaf[None], shown)
        mixed = []
        for low in range(0, queries, step):
            high = min(low + step, queries)
            seen = max(high + keys - queries, 1) if visible.causal else keys
            shape = (wide, high - low, seen)
            # The queries of heads that share keys come one after the other.
            scores = batched_dot(q[:, low:high].reshape(few, -1, head_dim), k[:, :seen], (2, 2))
            mask = shown.part(low, high, seen).without_band(seen)
            mask = None if mask is None else mask[0, 0]
            band = visible.band(*shape[1:], keys - queries + low)
            if band is not None:
                mask = band if mask is None else mask & band
            added = None if bias is None else bias[:, low:high, :seen]
            weights = softmax_weights(scores.reshape(shape), scale, added, mask).astype(q.dtype)
            if drawn is not None:
                start = (number * wide * queries + low) * keys
                weights = dropout_with_bits(weights, rate, drawn.part(row, start, shape))
            part = batched_dot(weights.reshape(few, -1, seen), v[:, :seen], (2, 1))
            mixed.append(part.reshape(wide, high - low, -1).astype(v.dtype))
        return jnp.concatenate(mixed, 1)

    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), visible)
    biases = None if bias is None else bias.reshape(blocks, -1, queries, keys)

    def by_block(x: jax.Array) -> jax.Array:  # (blocks, batch, heads of a piece, length, features)
        x = x.reshape(batch, x.shape[1], blocks, -1, x.shape[-1])
        return x.transpose(2, 0, 3, 1, 4)

    def block(part: tuple[jax.Array, ...]) -> jax.Array:
        number, q, k, v, added = part
        return jax.lax.map(
            lambda row: piece(number, added, *row), (jnp.arange(batch), q, k, v, rows)
        )

    parts = jnp.arange(blocks), by_block(query), by_block(key), by_block(value), biases
    out = jax.lax.map(block, parts)
    return out.transpose(1, 3, 0, 2, 4).reshape(batch, queries, heads, head_dim)


def direct_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Say why not to take :func:`direct_attention`."""
    if facts.platform != "cpu" or facts.devices > 1:
        return "it is for one CPU alone"
    if facts.dtype != "float32":
        return f"it computes in float32, not in {facts.dtype}"
    if facts.heads != facts.kv_heads:
        return "queries share keys"
    return None


def direct_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend with a derivative of our own, whose products take their arrays as they lie."""
    mask = visible.array(query.shape[1], key.shape[1])
    q, k, v = (x.swapaxes(1, 2) for x in (query, key, value))
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    bits = None if drawn is None else drawn.all()
    return _direct(scale, rate, q, k, v, mask, bias, bits).swapaxes(1, 2)


_Saved = tuple[jax.Array | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _direct(
    scale: float,
    rate: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    bits: jax.Array | None,
) -> jax.Array:
    """Attend with heads before positions; all weights are (batch, heads, queries, keys)."""
    return _direct_forward(scale, rate, q, k, v, mask, bias, bits)[0]


def _direct_forward(
    scale: float,
    rate: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    bits: jax.Array | None,
) -> tuple[jax.Array, _Saved]:
    weights = softmax_weights(batched_dot(q, k, (3, 3), batch=2), scale, bias, mask)
    mixed = batched_dot(_dropped(weights, rate, bits), v, (3, 2), batch=2)
    return mixed, (q, k, v, mask, bias, bits, weights)


def _direct_backward(scale: float, rate: float, saved: Any, g: jax.Array) -> _Saved:
    q, k, v, mask, bias, bits, weights = saved
    dv = batched_dot(_dropped(weights, rate, bits), g, (2, 2), batch=2)
    change = _dropped(batched_dot(g, v, (3, 3), batch=2), rate, bits)
    change = weights * (change - (weights * change).sum(-1, keepdims=True))
    if mask is not None:  # a row that sees nothing has weights all the same
        change = jnp.where(mask, change, 0.0)
    dbias = None
    if bias is not None:  # summed over the axes along which it was repeated
        axes = tuple(i for i in range(change.ndim) if bias.shape[i] != change.shape[i])
        dbias = change.sum(axes, keepdims=True).astype(bias.dtype)
    change = change * scale
    dq, dk = batched_dot(change, k, (3, 2), batch=2), batched_dot(change, q, (2, 2), batch=2)
    return dq, dk, dv, None, dbias, None


_direct.defvjp(_direct_forward, _direct_backward)


def _dropped(x: jax.Array, rate: float, bits: jax.Array | None) -> jax.Array:
    return x if bits is None else dropout_with_bits(x, rate, bits)


def few_queries_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Say why not to take :func:`few_queries_attention`."""
    if facts.platform != "cpu":
        return "it is for CPUs alone"
    if facts.dropout or not facts.queries <= 4 < facts.keys:
        return "it is for at most four queries of a cache, without dropout"
    return None


#: Keys up to which a sum over them is faster than a product of all heads, if rows are several.
SHORT_CACHE = 384


def few_queries_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
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
    in_head = jnp.arange(heads)[:, None] // group == jnp.arange(kv_heads)[None]
    columns = jnp.where(in_head[:, :, None], query[:, :, :, None, :], 0)
    columns = columns.reshape(batch, queries * heads, width)
    scores = batched_dot(key.reshape(batch, keys, width), columns, (2, 2))
    mask = visible.array(queries, keys)
    bias, mask = (None if x is None else x.transpose(0, 3, 2, 1) for x in (bias, mask))
    scores = scores.reshape(batch, keys, queries, heads)
    weights = softmax_weights(scores, scale, bias, mask, axis=1)
    weights = weights.astype(value.dtype)
    if (
        queries == group == 1 < batch and keys <= SHORT_CACHE
    ):  # one pass, each value multiplied once
        wide = weights.swapaxes(2, 3).astype(jnp.float32)
        return (wide * value.astype(jnp.float32)).sum(1)[:, None].astype(value.dtype)
    # A product gives every head all features, of which its own are kept.
    columns = weights.reshape(batch, keys, queries * heads)
    mixed = batched_dot(columns, value.reshape(batch, keys, -1), (1, 1))
    mixed = mixed.reshape(batch, queries, heads, kv_heads, head_dim)
    # Slices, since a sum over what was masked is computed inside of the next product, slowly.
    kept = [mixed[:, :, head, head * kv_heads // heads] for head in range(heads)]
    return jnp.stack(kept, axis=2).astype(value.dtype)


# -- the best of a large vocabulary
# ---------------------------------------------------------------------------------------

# Sizes of a block: smaller ones leave too many maxima, larger ones too many tokens to look at.
MIN_WIDTH, MAX_WIDTH = 4, 128


class LogitsProcessor(Protocol):
    """What is asked of a processor of logits: whether at ``length`` it leaves one token alone."""

    def forces(self, length: int | jax.Array, /) -> bool | jax.Array:
        """Tell so, as a bool that may be traced."""
        ...


def block_width(size: int) -> int | None:
    """Return the largest block that divides a vocabulary of ``size``; ``None`` if there is none."""
    widths = range(min(MAX_WIDTH, size // 4), MIN_WIDTH - 1, -1)
    return next((width for width in widths if size % width == 0), None)


def split_blocks(values: jax.Array, width: int) -> jax.Array:
    """Return (rows, blocks, width) of ``values`` (rows, size)."""
    return values.reshape(len(values), -1, width)


def block_maxima(values: jax.Array, width: int) -> jax.Array:
    """Return the maximum of each block, (rows, blocks), of ``values`` (rows, size)."""
    return split_blocks(values, width).max(-1)


def log_softmax_parts(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what ``log_softmax`` subtracts from logits (rows, size), and the maxima of blocks.

    The maximum and the logarithm of the summed exponentials, (rows, 1) each, to be subtracted in
    this order; then (rows, blocks).
    """

    def parts(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        maxima = block_maxima(rows, width)
        top = maxima.max(-1, keepdims=True)
        return top, jnp.log(jnp.exp(rows - top).sum(-1, keepdims=True)), maxima

    few = largest_divisor(len(logits), 8)
    if platform() != "cpu" or few == len(logits):
        return parts(logits)
    # A few rows at a time stay in the cache; exponentials of all take five times as long.
    by_group = jax.lax.map(parts, logits.reshape(-1, few, logits.shape[-1]))
    return jax.tree.map(lambda leaf: leaf.reshape(len(logits), -1), by_group)


def changed_blocks(processors: Sequence[object], size: int, width: int) -> np.ndarray | None:
    """Return the blocks with tokens that ``processors`` may change; ``None`` if that can be any.

    Numbers of blocks, ascending. ``size`` is that of the vocabulary.
    """
    changed: set[int] = set()
    for processor in processors:
        touched = getattr(processor, "affected_tokens", lambda: None)()
        if touched is None:
            return None
        changed |= {token // width for token in touched if token < size}
    # Looking at each anew would be no less work than at all.
    return None if 4 * len(changed) > size // width else np.asarray(sorted(changed), np.int32)


def update_block_maxima(
    processors: Sequence[LogitsProcessor],
    before: jax.Array,
    scores: jax.Array,
    length: int | jax.Array,
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
    return maxima.at[:, changed].set(split_blocks(scores, width)[:, changed].max(-1))


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
    best, indices = jax.lax.top_k(few.reshape(len(values), -1), count)
    blocks = jnp.take_along_axis(chosen, indices // width, axis=1)
    return best, blocks * width + indices % width


def argmax_from_maxima(values: jax.Array, maxima: jax.Array) -> jax.Array:
    """Return ``argmax(values, -1)`` as int32; arguments as in :func:`top_k`."""
    width = values.shape[-1] // maxima.shape[-1]
    chosen = fast_argmax(maxima)[:, None]
    return chosen[:, 0] * width + fast_argmax(_pick_blocks(values, chosen, width)[:, 0])


def _pick_blocks(values: jax.Array, blocks: jax.Array, width: int) -> jax.Array:
    """Return (rows, picks, width) of ``values`` (rows, size)."""
    wide = split_blocks(values, width)
    return jnp.take_along_axis(wide, blocks[:, :, None], axis=1, mode="clip")
