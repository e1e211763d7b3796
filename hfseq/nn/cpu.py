"""CPU-specific algorithms: attention in cache-sized blocks, attention with few queries, and top-k.

In this module, a row is one entry of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn.context import platform
from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.scores import batched_dot, softmax_weights
from hfseq.nn.visible import Visibility


def is_single_cpu() -> bool:
    """Returns whether the only device is a CPU.

    If the result is false, the functions of this module do not split the work into parts that fit
    into the CPU's caches. On accelerators, XLA fuses passes over memory, so splitting the work has
    no advantage. With several devices, the mesh already splits the batch, and a second split would
    conflict with the split of the mesh.
    """
    return platform() == "cpu" and jax.device_count() == 1


#: Number of tokens in a forward pass whose activations fit into the caches of a CPU.
CHUNK_TOKENS = 2048


def rows_per_chunk(width: int, most: int) -> int:
    """Returns how many sequences to process in one forward pass.

    Args:
        width: Number of tokens per sequence.
        most: The largest possible result. On a single CPU the result is smaller for long sequences,
            so that the activations fit into the caches.
    """
    return min(most, max(1, CHUNK_TOKENS // width)) if is_single_cpu() else most


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is at most `most`, and at least 1."""
    return next(part for part in range(max(min(most, size), 1), 0, -1) if size % part == 0)


def fast_argmax(x: jax.Array, top: jax.Array | None = None) -> jax.Array:
    """Returns `argmax(x, -1)` as int32.

    XLA does not vectorize argmax on a CPU, because argmax reduces pairs (value, index). This
    function computes two plain reductions instead, which XLA vectorizes. If there is a NaN among
    the values along the last axis, the result is the last index.

    Args:
        x: `(..., size)`.
        top: `x.max(-1)`, if it is already computed.
    """
    top = x.max(-1) if top is None else top
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == top[..., None], indices, x.shape[-1] - 1).min(-1)


# -- attention
# ---------------------------------------------------------------------------------------

# Number of attention scores per block. At four bytes per score, a block takes two mebibytes.
BLOCK_SCORES = 2**19

# If a call has fewer scores than this, all of them fit into the caches.
MIN_BLOCKED_SCORES = 2**20

# Number of queries per block of causal attention. Keys after the last query of a block are skipped.
CAUSAL_BLOCK_QUERIES = 128


def blocked_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `blocked_attention` does not support a call, or `None` if it does.

    A mask must be the same for all heads, and a bias must be the same for the whole batch.
    """
    scores = spec.batch * spec.heads * spec.queries * spec.keys
    if spec.queries == 1 or scores < MIN_BLOCKED_SCORES:
        return "all scores fit into the caches"
    if spec.platform != "cpu" or spec.devices > 1:
        return "it is for a single CPU"
    mask_shapes = ((1, spec.queries, spec.keys), (1, 1, spec.keys))
    if spec.mask is not None and spec.mask[1:] not in mask_shapes:
        return (
            f"all heads of a row must have the same mask, of shape {mask_shapes[0]}, not "
            f"{spec.mask}"
        )
    bias_shape = (1, spec.heads, spec.queries, spec.keys)
    if spec.bias is not None and spec.bias != bias_shape:
        return f"it requires a bias of shape {bias_shape}, not {spec.bias}"
    return None


def blocked_attention(call: AttentionCall) -> jax.Array:
    """Computes attention in blocks whose scores fit into the caches of a CPU.

    A block contains a few heads of one row, or all heads of several short rows. In causal attention
    the queries are divided into blocks too.
    """
    bias, scale, bits = call.bias, call.scale, call.dropout_bits
    batch, queries, heads, head_dim = call.query.shape
    keys, kv_heads = call.key.shape[1:3]
    group = heads // kv_heads
    block_kv_heads = largest_divisor(kv_heads, BLOCK_SCORES // (group * queries * keys))
    blocks, block_heads = kv_heads // block_kv_heads, block_kv_heads * group
    block_rows = largest_divisor(batch, BLOCK_SCORES // (block_heads * queries * keys))
    step = CAUSAL_BLOCK_QUERIES if call.visible.causal else queries

    # Only the inputs are saved for the backward pass. `prevent_cse` is not needed within a loop.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend_block(
        number: jax.Array,
        bias: jax.Array | None,
        row: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        row_visible: Visibility,
    ) -> jax.Array:
        row_visible = jax.tree.map(lambda leaf: leaf[None], row_visible)
        mixed = []
        for low in range(0, queries, step):
            high = min(low + step, queries)
            end = max(high + keys - queries, 1) if call.visible.causal else keys
            shape = (block_heads, high - low, end)
            # Query heads that share a key head are adjacent, so one matrix multiplication per key
            # head computes the scores of all of them.
            scores = batched_dot(
                q[:, low:high].reshape(block_kv_heads, -1, head_dim), k[:, :end], (2, 2)
            )
            mask = row_visible.part(low, high, end).without_band(end)
            mask = None if mask is None else mask[0, 0]
            band = call.visible.band(*shape[1:], keys - queries + low)
            if band is not None:
                mask = band if mask is None else mask & band
            block_bias = None if bias is None else bias[:, low:high, :end]
            weights = softmax_weights(scores.reshape(shape), scale, block_bias, mask)
            weights = weights.astype(q.dtype)
            if bits is not None:
                start = (number * block_heads * queries + low) * keys
                weights = dropout_with_bits(
                    weights, call.dropout_rate, bits.part(row, start, shape)
                )
            part = batched_dot(weights.reshape(block_kv_heads, -1, end), v[:, :end], (2, 1))
            mixed.append(part.reshape(block_heads, high - low, -1).astype(v.dtype))
        return jnp.concatenate(mixed, 1)

    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), call.visible)
    biases = None if bias is None else bias.reshape(blocks, -1, queries, keys)

    def by_block(x: jax.Array) -> jax.Array:  # (blocks, batch, heads per block, length, features)
        x = x.reshape(batch, x.shape[1], blocks, -1, x.shape[-1])
        return x.transpose(2, 0, 3, 1, 4)

    def attend_rows(part: tuple[jax.Array, ...]) -> jax.Array:
        number, q, k, v, block_bias = part
        return jax.lax.map(
            lambda row: attend_block(number, block_bias, *row),
            (jnp.arange(batch), q, k, v, rows),
            batch_size=block_rows if block_rows > 1 else None,
        )

    numbers = jnp.arange(blocks)
    arrays = by_block(call.query), by_block(call.key), by_block(call.value)
    out = jax.lax.map(attend_rows, (numbers, *arrays, biases))
    return out.transpose(1, 3, 0, 2, 4).reshape(batch, queries, heads, head_dim)


def direct_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `direct_attention` does not support a call, or `None` if it does."""
    if spec.platform != "cpu" or spec.devices > 1:
        return "it is for a single CPU"
    if spec.dtype != "float32":
        return f"it supports float32 only, not {spec.dtype}"
    if spec.heads != spec.kv_heads:
        return "it does not support grouped queries"
    return None


def direct_attention(call: AttentionCall) -> jax.Array:
    """Computes attention with a custom derivative that needs no transposed copies of its inputs."""
    bias, bits = call.bias, call.dropout_bits
    mask = call.visible.array(call.queries, call.keys)
    q, k, v = (x.swapaxes(1, 2) for x in (call.query, call.key, call.value))
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    all_bits = None if bits is None else bits.all()
    return _direct(call.scale, call.dropout_rate, q, k, v, mask, bias, all_bits).swapaxes(1, 2)


_Residuals = tuple[jax.Array | None, ...]


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
    """Computes attention of `(batch, heads, length, head_dim)`.

    Mask, bias and bits broadcast to `(batch, heads, queries, keys)`.
    """
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
) -> tuple[jax.Array, _Residuals]:
    weights = softmax_weights(batched_dot(q, k, (3, 3), batch=2), scale, bias, mask)
    mixed = batched_dot(_apply_dropout(weights, rate, bits), v, (3, 2), batch=2)
    return mixed, (q, k, v, mask, bias, bits, weights)


def _direct_backward(scale: float, rate: float, residuals: Any, g: jax.Array) -> _Residuals:
    q, k, v, mask, bias, bits, weights = residuals
    dv = batched_dot(_apply_dropout(weights, rate, bits), g, (2, 2), batch=2)
    grad = _apply_dropout(batched_dot(g, v, (3, 3), batch=2), rate, bits)
    grad = weights * (grad - (weights * grad).sum(-1, keepdims=True))
    if mask is not None:  # a fully masked query has nonzero weights
        grad = jnp.where(mask, grad, 0.0)
    dbias = None
    if bias is not None:  # summed over the axes along which the bias was broadcast
        axes = tuple(i for i in range(grad.ndim) if bias.shape[i] != grad.shape[i])
        dbias = grad.sum(axes, keepdims=True).astype(bias.dtype)
    grad = grad * scale
    dq, dk = batched_dot(grad, k, (3, 2), batch=2), batched_dot(grad, q, (2, 2), batch=2)
    return dq, dk, dv, None, dbias, None


_direct.defvjp(_direct_forward, _direct_backward)


def _apply_dropout(x: jax.Array, rate: float, bits: jax.Array | None) -> jax.Array:
    return x if bits is None else dropout_with_bits(x, rate, bits)


def few_queries_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `few_queries_attention` does not support a call, or `None` if it does."""
    if spec.platform != "cpu":
        return "it is for CPUs only"
    if spec.dropout or not spec.queries <= 4 < spec.keys:
        return "it supports at most four queries that attend to more than four keys, no dropout"
    return None


#: With a batch size above 1 and at most this number of keys, it is faster to multiply weights and
#: values elementwise and sum over the keys than to compute one matrix multiplication for all heads.
SHORT_CACHE = 384


def few_queries_attention(call: AttentionCall) -> jax.Array:
    """Computes attention of a few queries to a long cache, and reads the cache in memory order.

    With one matrix multiplication per head, XLA would first transpose the whole cache, because its
    CPU kernels require the head axis before the positions. Instead, this function computes all
    scores of a row in one matrix multiplication. It multiplies the cache by a matrix that has one
    column for each pair of query and head. A column is zero outside of the features of its head.
    This multiplies the number of operations by the number of heads, but takes a fifth of the time.
    """
    query, key, value = call.query, call.key, call.value
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    width, group = kv_heads * head_dim, heads // kv_heads
    # This is a comparison instead of a constant array, because XLA fuses a comparison into its use.
    in_head = jnp.arange(heads)[:, None] // group == jnp.arange(kv_heads)[None]
    columns = jnp.where(in_head[:, :, None], query[:, :, :, None, :], 0)
    columns = columns.reshape(batch, queries * heads, width)
    scores = batched_dot(key.reshape(batch, keys, width), columns, (2, 2))
    mask = call.visible.array(queries, keys)
    bias, mask = (None if x is None else x.transpose(0, 3, 2, 1) for x in (call.bias, mask))
    scores = scores.reshape(batch, keys, queries, heads)
    weights = softmax_weights(scores, call.scale, bias, mask, axis=1)
    weights = weights.astype(value.dtype)
    if queries == group == 1 < batch and keys <= SHORT_CACHE:  # multiply elementwise
        per_value = weights.swapaxes(2, 3).astype(jnp.float32)
        return (per_value * value.astype(jnp.float32)).sum(1)[:, None].astype(value.dtype)
    # For each query head, the multiplication computes the features of all value heads. Select the
    # features of the value head that belongs to the query head.
    columns = weights.reshape(batch, keys, queries * heads)
    mixed = batched_dot(columns, value.reshape(batch, keys, -1), (1, 1))
    mixed = mixed.reshape(batch, queries, heads, kv_heads, head_dim)
    # Use slices, because XLA would compute a masked sum inside of the next matrix multiplication,
    # which is slow.
    head_slices = [mixed[:, :, head, head * kv_heads // heads] for head in range(heads)]
    return jnp.stack(head_slices, axis=2).astype(value.dtype)


# -- the best tokens of a large vocabulary
# ---------------------------------------------------------------------------------------

# The vocabulary is divided into blocks of this width. With smaller blocks there are too many block
# maxima to compare, and with larger blocks too many tokens within the selected blocks.
MIN_WIDTH, MAX_WIDTH = 4, 128


class LogitsProcessor(Protocol):
    """The interface of logits processors that this module uses."""

    def forces(self, length: int | jax.Array, /) -> bool | jax.Array:
        """Returns whether only one token may follow `length` tokens. The result may be traced."""
        ...


def block_width(size: int) -> int | None:
    """Returns the largest block width that divides the vocabulary size, or `None`."""
    widths = range(min(MAX_WIDTH, size // 4), MIN_WIDTH - 1, -1)
    return next((width for width in widths if size % width == 0), None)


def split_blocks(values: jax.Array, width: int) -> jax.Array:
    """Reshapes `(rows, size)` to `(rows, blocks, width)`."""
    return values.reshape(len(values), -1, width)


def block_maxima(values: jax.Array, width: int) -> jax.Array:
    """Splits `values`, `(rows, size)`, into blocks and returns their maxima, `(rows, blocks)`."""
    return split_blocks(values, width).max(-1)


def log_softmax_parts(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the numbers that `log_softmax` subtracts from the logits, and the block maxima.

    Args:
        logits: `(rows, size)`.
        width: Width of a block.

    Returns:
        The maximum logit and the logarithm of the summed exponentials, `(rows, 1)` each, and the
        block maxima, `(rows, blocks)`. Subtract the first two from the logits, in this order.
    """

    def parts(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        maxima = block_maxima(rows, width)
        top = maxima.max(-1, keepdims=True)
        return top, jnp.log(jnp.exp(rows - top).sum(-1, keepdims=True)), maxima

    group_size = largest_divisor(len(logits), 8)
    if platform() != "cpu" or group_size == len(logits):
        return parts(logits)
    # Process a few rows at a time, so that they fit into the caches of the CPU. Computing the
    # exponentials of all rows at once takes five times as long.
    by_group = jax.lax.map(parts, logits.reshape(-1, group_size, logits.shape[-1]))
    return jax.tree.map(lambda leaf: leaf.reshape(len(logits), -1), by_group)


def changed_blocks(processors: Sequence[object], size: int, width: int) -> np.ndarray | None:
    """Returns the blocks that contain tokens whose scores the processors may change.

    Args:
        processors: Logits processors. `affected_tokens()`, if defined, returns the tokens whose
            scores a processor may change.
        size: Size of the vocabulary.
        width: Width of a block.

    Returns:
        Block numbers in ascending order. The result is `None` if a processor may change any token,
        or if more than a quarter of the blocks may change.
    """
    changed: set[int] = set()
    for processor in processors:
        affected = getattr(processor, "affected_tokens", lambda: None)()
        if affected is None:
            return None
        changed |= {token // width for token in affected if token < size}
    # If more than a quarter of the blocks may change, updating the maxima is not faster than
    # computing them again.
    return None if 4 * len(changed) > size // width else np.asarray(sorted(changed), np.int32)


def update_block_maxima(
    processors: Sequence[LogitsProcessor],
    maxima: jax.Array,
    scores: jax.Array,
    length: int | jax.Array,
    changed: np.ndarray,
) -> jax.Array:
    """Returns the block maxima of processed scores, and reads only the changed blocks again.

    Args:
        processors: The logits processors that returned `scores`.
        maxima: Block maxima of the scores before the processors, `(rows, blocks)`.
        scores: The processed scores, `(rows, size)`.
        length: Length of the sequences.
        changed: The blocks that the processors may change, from `changed_blocks`.

    Returns:
        The maxima, `(rows, blocks)`.
    """
    width = scores.shape[-1] // maxima.shape[-1]
    for processor in processors:
        maxima = jnp.where(processor.forces(length), -jnp.inf, maxima)
    if not changed.size:
        return maxima
    return maxima.at[:, changed].set(split_blocks(scores, width)[:, changed].max(-1))


def top_k(
    values: jax.Array, count: int, maxima: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the same as `jax.lax.top_k(values, count)`, but sorts only a few blocks of `values`.

    The `count` blocks with the largest maxima contain the result. If values are equal, those with
    the smallest indices are returned.

    Args:
        values: `(rows, size)`.
        count: Number of values per row.
        maxima: Block maxima of `values`, `(rows, blocks)`, if they are already computed.

    Returns:
        Values and indices, `(rows, count)` each.
    """
    if maxima is None:
        width = block_width(values.shape[-1])
        if width is None or values.shape[-1] < 8 * count * width:
            return jax.lax.top_k(values, count)
        maxima = block_maxima(values, width)
    width = values.shape[-1] // maxima.shape[-1]
    # Blocks are sorted by position, so that the order of equal values does not change.
    best_blocks = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[-1]))[1], axis=-1)
    candidates = _pick_blocks(values, best_blocks, width)
    best, indices = jax.lax.top_k(candidates.reshape(len(values), -1), count)
    blocks = jnp.take_along_axis(best_blocks, indices // width, axis=1)
    return best, blocks * width + indices % width


def argmax_from_maxima(values: jax.Array, maxima: jax.Array) -> jax.Array:
    """Returns `argmax(values, -1)` as int32.

    Args:
        values: `(rows, size)`.
        maxima: Block maxima of `values`, `(rows, blocks)`.
    """
    width = values.shape[-1] // maxima.shape[-1]
    best_block = fast_argmax(maxima)[:, None]
    return best_block[:, 0] * width + fast_argmax(_pick_blocks(values, best_block, width)[:, 0])


def _pick_blocks(values: jax.Array, blocks: jax.Array, width: int) -> jax.Array:
    """Selects blocks of `values`, `(rows, size)`.

    Args:
        values: `(rows, size)`.
        blocks: Numbers of the selected blocks, `(rows, picks)`.
        width: Width of a block.

    Returns:
        The selected blocks, `(rows, picks, width)`.
    """
    all_blocks = split_blocks(values, width)
    return jnp.take_along_axis(all_blocks, blocks[:, :, None], axis=1, mode="clip")
