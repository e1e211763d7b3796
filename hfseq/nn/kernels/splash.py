"""Splash attention on TPUs.

It supports packed documents, padding, windows, grouped-query attention and cross-attention.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR, batch_axes
from hfseq.nn.visible import HIDDEN_SEGMENT, Visibility

#: Lengths are padded to multiples of this number. Padding gets a segment number that no token has.
LANES = 128
PADDING_SEGMENT = HIDDEN_SEGMENT - 1
#: Keys and queries per block. The largest size that divides both lengths is the fastest. Blocks of
#: 2048 do not fit into a TPU v5e.
BLOCK_SIZES = (1024, 512, 256, 128)


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why splash attention does not support a call, or `None` if it does."""
    if spec.platform != "tpu":
        return "it runs on TPUs only"
    if spec.bias is not None:
        return "it does not support a bias"
    if spec.dropout:
        return "it does not support dropout"
    if spec.mask is not None:
        return "a mask of all queries and keys would become a constant of the program"
    if min(spec.queries, spec.keys) < LANES:
        return f"fewer than {LANES} queries or keys would be mostly padding"
    if spec.segments == "both" and (spec.causal or spec.window):
        return "finding fully masked queries would require all scores"
    if spec.lengths and spec.segments in ("same", "both") and (spec.causal or spec.window):
        return "finding fully masked queries would require all scores"
    if spec.num_shards(SEQUENCE) > 1:
        return "the mesh splits sequences"
    if spec.batch % spec.num_shards(*BATCH_AXES) or spec.heads % spec.num_shards(TENSOR):
        return "the mesh does not divide the batch or the heads evenly"
    return None


def splash_attention(call: AttentionCall, *, interpret: bool = False) -> jax.Array:
    """Computes attention in blocks of up to 1024 queries and keys.

    Over a mesh each device computes its own part of the batch and its own heads. A fully masked
    query gets an arbitrary output and a wrong gradient. `hfseq.nn.attend` replaces the output by
    zeros, which also stops the gradient.

    Args:
        call: The inputs.
        interpret: Whether to run the kernels as plain jax operations, on any platform.
    """
    query, key, value, visible, mesh = call.query, call.key, call.value, call.visible, call.mesh
    kernels = _kernel_module()
    queries, keys, heads = query.shape[1], key.shape[1], query.shape[2]
    segments = _segments(visible, query.shape[0], queries, keys)
    padded_queries, padded_keys = (-(-n // LANES) * LANES for n in (queries, keys))
    tensor_shards = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    if key.shape[2] % tensor_shards:
        key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    row_kernel = _kernel(
        heads // tensor_shards,
        padded_queries,
        padded_keys,
        keys - queries,
        visible.causal,
        visible.window,
        interpret,
    )
    if segments is None and (padded_queries, padded_keys) != (queries, keys):
        segments = _one_segment(query.shape[0], queries), _one_segment(query.shape[0], keys)
    ids = None
    if segments is not None:
        paddings = (padded_queries - queries, padded_keys - keys)
        padded = (
            jnp.pad(x, ((0, 0), (0, padding)), constant_values=PADDING_SEGMENT)
            for x, padding in zip(segments, paddings, strict=True)
        )
        ids = kernels.SegmentIds(*padded)

    def attend_local(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> jax.Array:
        def heads_first(x: jax.Array, length: int) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)

        scaled = (q.astype(jnp.float32) * call.scale).astype(q.dtype)
        arrays = (
            heads_first(scaled, padded_queries),
            heads_first(k, padded_keys),
            heads_first(v, padded_keys),
        )
        return jax.vmap(row_kernel)(*arrays, ids).swapaxes(1, 2)[:, :queries].astype(v.dtype)

    if mesh is None or mesh.size == 1:
        return attend_local(query, key, value, ids)
    rows = batch_axes(mesh) or None
    heads_spec = PartitionSpec(rows, None, TENSOR if TENSOR in mesh.axis_names else None)
    specs = (heads_spec, heads_spec, heads_spec, PartitionSpec(rows))
    run = jax.shard_map(
        attend_local, mesh=mesh, in_specs=specs, out_specs=heads_spec, check_vma=False
    )
    return run(query, key, value, ids)


def _one_segment(rows: int, length: int) -> jax.Array:
    return jnp.ones((rows, length), jnp.int32)


def _segments(
    visible: Visibility, rows: int, queries: int, keys: int
) -> tuple[jax.Array, jax.Array] | None:
    """Expresses the visibility without `causal` and `window` by segment numbers.

    Returns:
        The segment numbers of queries and keys, or `None` if all keys are visible.
    """
    query_segments, key_segments = visible.query_segments, visible.key_segments
    if query_segments is not None:
        key_segments = query_segments if key_segments is None else key_segments
    elif key_segments is not None:  # all queries and all visible keys are in segment 1
        query_segments = _one_segment(rows, queries)
        key_segments = (key_segments != 0).astype(jnp.int32)
    elif visible.key_lengths is not None:
        query_segments, key_segments = _one_segment(rows, queries), _one_segment(rows, keys)
    else:
        return None
    if visible.key_lengths is not None:
        within = jnp.arange(keys) < visible.key_lengths[:, None]
        key_segments = jnp.where(within, key_segments, HIDDEN_SEGMENT)
    return query_segments.astype(jnp.int32), key_segments.astype(jnp.int32)


@functools.cache
def _kernel(
    heads: int,
    queries: int,
    keys: int,
    offset: int,
    causal: bool,
    window: tuple[int, int] | None,
    interpret: bool,
) -> Any:
    """Returns the kernel for one entry of the batch.

    `causal` and `window` are compiled into the kernel as block masks.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (queries, keys)
    if window is not None:
        sides = (window[0], 0 if causal else window[1])
        mask: Any = masks.LocalMask(shape, sides, offset)
    else:
        mask = masks.CausalMask(shape, offset) if causal else masks.FullMask(shape)
    block = next(size for size in BLOCK_SIZES if queries % size == keys % size == 0)
    with jax.ensure_compile_time_eval():
        return _kernel_module().make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=_kernel_module().BlockSizes(*[block] * 8),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _kernel_module() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel
