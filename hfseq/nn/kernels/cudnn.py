"""cuDNN's fused attention on NVIDIA GPUs.

It supports padding at the end, packed rows, windows of earlier keys, and biases. A row is one entry
of the batch. A packed row contains several documents.

cuDNN's dropout is not used: its masks do not depend on seed, step and row, but on how often the
process has run the program. Some features are not available in jax's public function, so this
module calls jax's internal function.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR

#: The share of a device's memory that the softmax statistics of packed rows may use, and the memory
#: in bytes that is assumed if a device does not report its memory.
MAX_STATISTICS_SHARE, DEFAULT_MEMORY = 0.1, 64e9


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `cudnn_attention` does not support a call, or `None` if it does."""
    if spec.segments:
        return "it supports padding by lengths only, not hidden keys at any position"
    if spec.mask is not None or spec.bias is not None:
        return "it does not support masks and biases over all queries and keys (see cudnn_bias)"
    return _common_unsupported_reason(spec)


def packed_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `packed_attention` does not support a call, or `None` if it does."""
    if spec.segments != "same" or spec.lengths:
        return "it is for self-attention in rows of packed documents"
    if spec.mask is not None or spec.bias is not None:
        return "it does not support masks and biases"
    if spec.capability is not None and spec.capability < (9, 0):
        return "packed rows require compute capability 9.0 or higher"
    if spec.max_runs is None:
        return "the maximum number of documents per row is unknown"
    rows = spec.batch / spec.num_shards(*BATCH_AXES)
    heads = spec.heads / spec.num_shards(TENSOR)
    needed = rows * spec.max_runs * heads * spec.queries * 4
    if needed > MAX_STATISTICS_SHARE * (spec.memory or DEFAULT_MEMORY):
        return (
            f"statistics for {spec.max_runs} documents per row would use {needed / 1e9:.1f} GB "
            f"per layer, more than {MAX_STATISTICS_SHARE:.0%} of the memory"
        )
    return _common_unsupported_reason(spec)


def bias_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `bias_attention` does not support a bias or a dense mask, or `None` if it does.

    Calls with padding or packed documents are rejected here, because they would need a mask of all
    queries and keys. The implementation "cudnn_mask" accepts them (`mask_unsupported_reason`). It
    comes later in the order of candidates.
    """
    if spec.mask is None and spec.bias is None:
        return "the call has neither a bias nor a dense mask"
    if spec.segments or spec.lengths:
        return "padding and documents would become a mask of all queries and keys"
    return mask_unsupported_reason(spec)


def mask_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why `bias_attention` does not support a call with a mask, or `None` if it does.

    The mask may also describe padding or packed documents.
    """
    if spec.queries % 2 or spec.keys % 2:
        return f"{spec.queries} queries and {spec.keys} keys must both be even"
    if spec.window is not None:
        return "it does not support a window together with a mask"
    return _common_unsupported_reason(spec)


def _common_unsupported_reason(spec: AttentionSpec) -> str | None:
    max_head_dim = 256 if spec.capability is None or spec.capability >= (9, 0) else 128
    if spec.platform != "cuda":
        return "cuDNN runs on NVIDIA GPUs only"
    if spec.capability is not None and spec.capability < (8, 0):
        return "it requires compute capability 8.0 or higher"
    if spec.deterministic:
        return (
            "XLA fails if deterministic operations are enabled and two layers are equal "
            "(openxla/xla#46500)"
        )
    if spec.dropout:
        return "its dropout is not a function of seed, step and row"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"it supports bfloat16 and float16 only, not {spec.dtype}"
    if spec.head_dim > max_head_dim or spec.head_dim % 8:
        return f"head_dim {spec.head_dim} is not a multiple of 8 up to {max_head_dim}"
    if spec.causal and spec.queries != spec.keys:
        return "causal attention requires as many queries as keys"
    if spec.window is not None and (not spec.causal or spec.window[0] < 1):
        return "a window requires causal attention"
    if spec.window is not None and spec.lengths:
        return "it does not support a window together with lengths"
    if spec.num_shards(SEQUENCE) > 1:
        return "the mesh splits sequences"
    if spec.batch % spec.num_shards(*BATCH_AXES) or spec.heads % spec.num_shards(TENSOR):
        return "the mesh does not divide the batch or the heads evenly"
    return None


def cudnn_attention(call: AttentionCall) -> jax.Array:
    """Computes attention without a mask array.

    It supports causal attention, windows of earlier keys, and padding described by lengths. The
    queries of a row whose length is 0 get an arbitrary output, which `hfseq.nn.attend` replaces by
    zeros.
    """
    lengths = call.visible.key_lengths
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
        key, value = (_zero_padding_gradient(x, lengths) for x in (call.key, call.value))
        call = dataclasses.replace(call, key=key, value=value)
        # Queries at padding positions attend to the keys of their row, as in the other
        # implementations.
        queries = jnp.full_like(lengths, call.queries)
        lengths = jnp.maximum(lengths, 1)
        return _attend(call, q_seqlen=queries, kv_seqlen=lengths)
    return _attend(call, sliding_window_length=_window_length(call))


@jax.custom_vjp
def _zero_padding_gradient(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns `x`, and sets its gradient to zero after the first `lengths` positions of each row.

    cuDNN does not write the gradients of padding keys. Since June 2026 XLA sets them to zero, but
    not in CUDA graphs (openxla/xla pull requests 44867 and 46500).
    """
    return x


def _zero_padding_backward(lengths: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    exists = jnp.arange(gradient.shape[1]) < lengths[:, None]
    return jnp.where(exists[:, :, None, None], gradient, 0), None


_zero_padding_gradient.defvjp(lambda x, lengths: (x, lengths), _zero_padding_backward)


def packed_attention(call: AttentionCall) -> jax.Array:
    """Computes attention within each run of equal segments, that is, within each document.

    Only the first `visible.max_runs` runs of a row are computed. The data pipeline guarantees that
    there are no more.
    """
    visible = call.visible
    assert visible.query_segments is not None and visible.max_runs is not None
    lengths, offsets = run_offsets(visible.query_segments, visible.max_runs)
    return _attend(
        call,
        equal_heads=True,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        sliding_window_length=_window_length(call),
    )


def bias_attention(call: AttentionCall) -> jax.Array:
    """Computes attention with a bias or a mask of all queries and keys."""
    queries, keys = call.queries, call.keys
    mask = call.visible.without_band(keys)

    def expand(x: jax.Array) -> jax.Array:
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        return jnp.broadcast_to(x, (*x.shape[:2], queries, keys))

    bias = call.bias
    if bias is not None:
        bias = expand(bias).astype(call.query.dtype)
        bias = jnp.broadcast_to(bias, (bias.shape[0], call.query.shape[2], queries, keys))
    return _attend(call, bias=bias, mask=None if mask is None else expand(mask))


def run_offsets(segments: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Finds the runs of equal segments in each row.

    Padding counts as a run, so that every query sees a key.

    Args:
        segments: Segment numbers, `(batch, length)`.
        most: The maximum number of runs per row.

    Returns:
        The lengths of the runs, int32 `(batch, most)`, and the positions at which they start, int32
        `(batch, most + 1)`. Unused entries are -1, and the last start of each row is always unused.
        jax concatenates the used entries of all rows, separately for lengths and starts, so each
        used length must have a used start.
    """
    first = jnp.ones_like(segments[:, :1], bool)
    is_start = jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)
    find = functools.partial(jnp.nonzero, size=most + 1, fill_value=segments.shape[1])
    starts = jax.vmap(lambda row: find(row)[0])(is_start)
    exists = jnp.arange(most) < is_start.sum(1)[:, None]
    lengths = jnp.where(exists, starts[:, 1:] - starts[:, :-1], -1)
    offsets = jnp.pad(jnp.where(exists, starts[:, :-1], -1), ((0, 0), (0, 1)), constant_values=-1)
    return lengths.astype(jnp.int32), offsets.astype(jnp.int32)


def _window_length(call: AttentionCall) -> int | None:
    """Returns the length of the window as cuDNN counts it, including the query's own key."""
    window = call.visible.window
    return None if window is None else window[0] + 1


def _attend(
    call: AttentionCall,
    *,
    equal_heads: bool = False,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    sliding_window_length: int | None = None,
    **runs: Any,
) -> jax.Array:
    """Calls cuDNN.

    Args:
        call: The inputs.
        equal_heads: Whether to repeat keys and values for each query head if the jax version
            requires it.
        bias: Added to the scores, `(1 or batch, heads, queries, keys)`.
        mask: Boolean mask, `(1 or batch, 1 or heads, queries, keys)`.
        sliding_window_length: Number of visible keys, including the query's own key.
        **runs: Lengths and offsets of rows or of runs, as arguments of jax's internal function.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    query, key, value, causal = call.query, call.key, call.value, call.visible.causal
    heads, kv_heads = query.shape[2], key.shape[2]
    tensor_shards = 1 if call.mesh is None else call.mesh.shape.get(TENSOR, 1)
    # jax 0.10 computes the offsets of packed keys from the number of query heads, which is wrong if
    # there are fewer key heads (fixed in 0.11). Over a mesh, the heads of queries and keys must be
    # split alike.
    old_jax = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    if heads != kv_heads and ((equal_heads and old_jax) or kv_heads % tensor_shards):
        key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    queries, keys = call.queries, call.keys
    if queries % 2 or keys % 2:
        # In the backward pass, jax refuses odd lengths even if there is no bias. With a bias or a
        # mask, they are refused earlier (`mask_unsupported_reason`).
        query, key, value = (_pad_to_even(x) for x in (query, key, value))
        if not causal and not runs:
            length = functools.partial(jnp.full, len(query), dtype=jnp.int32)
            runs = {"q_seqlen": length(queries), "kv_seqlen": length(keys)}
    if "q_seqlen" in runs:
        mask_type = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    else:
        mask_type = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    mixed: jax.Array = cudnn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=call.scale,
        mask_type=mask_type,
        sliding_window_length=sliding_window_length,
        **runs,
    )
    return mixed[:, :queries].astype(value.dtype)


def _pad_to_even(x: jax.Array) -> jax.Array:
    """Appends a position to `x`, `(batch, length, heads, head_dim)`, if its length is odd."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
