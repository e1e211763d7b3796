"""Attention in our own Triton kernel on NVIDIA GPUs, with dropout that resumes to the bit.

What cuDNN's does not do: padding anywhere, windows that look ahead, any number of documents in a
row, float32, and dropping the very weights that the explicit form drops. Memory is linear in the
number of positions: beside the arguments the output and a number of each head's query are kept. A
bias is as large as the scores of a row, and so is its gradient, which has a kernel of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.random import LazyBits
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR
from hfseq.nn.visible import Visibility

TYPES = ("float16", "bfloat16", "float32")


def unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why these kernels cannot serve, or None."""
    if facts.platform != "cuda":
        return "Triton's kernels run on NVIDIA GPUs only"
    if facts.capability is None or facts.capability < (8, 0):
        return "it needs compute capability 8.0 or more"
    if jnp.dtype(facts.dtype).name not in TYPES:
        return f"{facts.dtype} is none of {', '.join(TYPES)}"
    widest = _widest(facts.capability, facts.half)
    if facts.head_dim > widest:
        return f"a head of {facts.head_dim} is wider than {widest}, what this GPU's blocks can hold"
    if facts.mask is not None:
        return "a dense mask would be read from memory"
    if facts.bias is not None and not _is_whole(facts):
        return f"a bias of {facts.bias} is not written out for all heads, queries and keys"
    if facts.dropout >= 1.0:
        return "a dropout of 1 leaves nothing to compute"
    if facts.num_shards(SEQUENCE) > 1:
        return "the mesh cuts sequences"
    if facts.batch % facts.num_shards(*BATCH_AXES):
        return f"{facts.num_shards(*BATCH_AXES)} devices do not divide a batch of {facts.batch}"
    if facts.heads % facts.num_shards(TENSOR):
        return f"{facts.num_shards(TENSOR)} devices do not divide {facts.heads} heads"
    return None


def _is_whole(facts: AttentionSpec) -> bool:
    """Tell whether the bias has all sizes of the scores, but for the batch's."""
    sizes = (facts.heads, facts.queries, facts.keys)
    return facts.bias in ((1, *sizes), (facts.batch, *sizes))


def _widest(capability: tuple[int, int], half: bool) -> int:
    """Return the widest head whose tiles fit the shared memory of a block of threads."""
    if capability[0] in (9, 10):  # 227 KiB
        return 256
    return 128 if half or capability in ((8, 0), (8, 7)) else 64  # 163 KiB; 99 KiB


def flash_attention(
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
    """Attend in tiles; a query that sees no key gets 0, and gives no gradient.

    Products are taken in the type of the inputs and summed in float32, as softmax is; those of
    float32 inputs have float32's error, in three TF32 products each.

    **Arguments:** ``query`` (batch, queries, heads, head_dim); ``key``, ``value`` (batch, keys,
    kv_heads, head_dim); any lengths. ``bias`` (1 or batch, heads, queries, keys) is added to the
    scores. A weight is dropped with probability ``rate`` by its bits of ``drawn``, whose shape is
    (batch, heads, queries, keys). Over a ``mesh`` each device attends to its rows and heads, and
    nothing is exchanged but the gradient of a bias that rows share. ``interpret`` runs the kernels
    as plain jax, anywhere.

    **Returns:** (batch, queries, heads, head_dim) in the type of ``value``.
    """
    from hfseq.nn.kernels import flash_tiles

    if visible.dense is not None:
        raise ValueError("flash: a dense mask is not supported")
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        whole = (query.shape[2], query.shape[1], key.shape[1])
        if bias.shape not in ((1, *whole), (len(query), *whole)):
            raise ValueError(f"flash: a bias of {bias.shape} is not written out for {whole}")
    threshold = min(round(rate * 65536), 65535) if drawn is not None else 0
    before, after = visible.window or (None, None)
    form = flash_tiles.AttentionForm(
        scale, before, 0 if visible.causal else after, threshold, interpret
    )
    key_segments = visible.key_segments
    if key_segments is None:
        key_segments = visible.query_segments
    lengths = visible.key_lengths
    if lengths is not None:
        lengths = jnp.minimum(lengths, key.shape[1]).astype(jnp.int32)[:, None]
    rows: flash_tiles.RowArrays[jax.Array] = flash_tiles.RowArrays(
        queries=visible.query_segments,
        keys=key_segments,
        lengths=lengths,
        seeds=drawn.seeds() if drawn is not None and threshold else None,
        bias=bias,
    )
    if mesh is None or mesh.size == 1:
        return flash_tiles.attention(form, query, key, value, rows)

    ways = mesh.shape.get(TENSOR, 1)
    heads, shared = query.shape[2], query.shape[2] // key.shape[2]
    if key.shape[2] % ways:
        key, value = (jnp.repeat(leaf, shared, axis=2) for leaf in (key, value))

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, rows: flash_tiles.RowArrays[jax.Array]
    ) -> jax.Array:
        if rows.seeds is not None and ways > 1:
            # The bits are those of the whole array: this device's first head is not head 0.
            skipped = jax.lax.axis_index(TENSOR) * (heads // ways * query.shape[1] * key.shape[1])
            offset = rows.seeds[:, 2] + skipped.astype(jnp.uint32)
            rows = rows._replace(seeds=rows.seeds.at[:, 2].set(offset))
        return flash_tiles.attention(form, query, key, value, rows)

    batch = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names) or None
    split = PartitionSpec(batch, None, TENSOR if TENSOR in mesh.axis_names else None)
    own = PartitionSpec(batch)
    added = None if bias is None else PartitionSpec(batch if len(bias) > 1 else None, split[2])
    specs = (split, split, split, flash_tiles.RowArrays(own, own, own, own, added))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return run(query, key, value, rows)
