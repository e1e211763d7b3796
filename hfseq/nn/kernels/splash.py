"""Splash attention on TPUs: documents, padding, windows, grouped queries, cross-attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.random import LazyBits
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR
from hfseq.nn.visible import HIDDEN_SEGMENT, Visibility

#: Lengths are filled up to multiples of it, in segments that nothing else is in.
LANES = 128
PADDING_SEGMENT = HIDDEN_SEGMENT - 1
#: Keys and queries of a block; the largest that divides both lengths is the fastest. One of 2048
#: does not fit into a TPU v5e.
BLOCK_SIZES = (1024, 512, 256, 128)


def unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why splash attention cannot serve, or None."""
    if facts.platform != "tpu":
        return "it runs on TPUs only"
    if facts.bias is not None:
        return "it adds no bias to the scores"
    if facts.dropout:
        return "it has no dropout"
    if facts.mask is not None:
        return "a mask of all queries and keys would be a table of the program"
    if min(facts.queries, facts.keys) < LANES:
        return f"fewer than {LANES} queries or keys would be mostly padding"
    if facts.segments == "both" and (facts.causal or facts.window):
        return "which queries see nothing cannot be told without all scores"
    if facts.lengths and facts.segments in ("same", "both") and (facts.causal or facts.window):
        return "which queries see nothing cannot be told without all scores"
    if facts.num_shards(SEQUENCE) > 1:
        return "the mesh cuts sequences"
    if facts.batch % facts.num_shards(*BATCH_AXES) or facts.heads % facts.num_shards(TENSOR):
        return "the mesh does not divide the rows or the heads"
    return None


def splash_attention(
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
    interpret: bool = False,
) -> jax.Array:
    """Attend in blocks of up to 1024; over a ``mesh`` each device to its own rows and heads.

    Queries that see nothing come out as something and pass on a wrong gradient;
    :func:`hfseq.nn.attend` makes zero of them, and so of what they pass on. ``interpret`` runs the
    kernels as plain jax, anywhere.
    """
    kernels = _kernels()
    queries, keys, heads = query.shape[1], key.shape[1], query.shape[2]
    segments = _segments(visible, query.shape[0], queries, keys)
    width, depth = (-(-n // LANES) * LANES for n in (queries, keys))
    ways = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    if key.shape[2] % ways:
        key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    one_row = _kernel(
        heads // ways, width, depth, keys - queries, visible.causal, visible.window, interpret
    )
    if segments is None and (width, depth) != (queries, keys):
        segments = _whole(query.shape[0], queries), _whole(query.shape[0], keys)
    ids = None
    if segments is not None:
        ends = (width - queries, depth - keys)
        filled = (
            jnp.pad(x, ((0, 0), (0, more)), constant_values=PADDING_SEGMENT)
            for x, more in zip(segments, ends, strict=True)
        )
        ids = kernels.SegmentIds(*filled)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> jax.Array:
        def heads_first(x: jax.Array, length: int) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)

        scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
        arrays = heads_first(scaled, width), heads_first(k, depth), heads_first(v, depth)
        return jax.vmap(one_row)(*arrays, ids).swapaxes(1, 2)[:, :queries].astype(v.dtype)

    if mesh is None or mesh.size == 1:
        return local(query, key, value, ids)
    rows = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names) or None
    split = PartitionSpec(rows, None, TENSOR if TENSOR in mesh.axis_names else None)
    specs = (split, split, split, PartitionSpec(rows))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return run(query, key, value, ids)


def _whole(rows: int, length: int) -> jax.Array:
    return jnp.ones((rows, length), jnp.int32)


def _segments(
    visible: Visibility, rows: int, queries: int, keys: int
) -> tuple[jax.Array, jax.Array] | None:
    """Return segments of queries and keys that say all but ``causal`` and ``window``."""
    own, other = visible.query_segments, visible.key_segments
    if own is not None:
        other = own if other is None else other
    elif other is not None:  # what is there is one segment, which all queries are in
        own, other = _whole(rows, queries), (other != 0).astype(jnp.int32)
    elif visible.key_lengths is not None:
        own, other = _whole(rows, queries), _whole(rows, keys)
    else:
        return None
    if visible.key_lengths is not None:
        other = jnp.where(jnp.arange(keys) < visible.key_lengths[:, None], other, HIDDEN_SEGMENT)
    return own.astype(jnp.int32), other.astype(jnp.int32)


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
    """Return the kernel of one row, whose masks are tables of blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (queries, keys)
    if window is not None:
        sides = (window[0], 0 if causal else window[1])
        mask: Any = masks.LocalMask(shape, sides, offset)
    else:
        mask = masks.CausalMask(shape, offset) if causal else masks.FullMask(shape)
    block = next(size for size in BLOCK_SIZES if queries % size == keys % size == 0)
    with jax.ensure_compile_time_eval():
        return _kernels().make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=_kernels().BlockSizes(*[block] * 8),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _kernels() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel
