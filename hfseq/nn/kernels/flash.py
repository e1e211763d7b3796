"""Flash attention in hfseq's own Triton kernels for NVIDIA GPUs, with reproducible dropout.

Unlike cuDNN's attention, these kernels support padding at any position, windows on both sides, any
number of documents per row (a row is one entry of the batch), and float32. They also support
dropout: the dropout masks equal those of the explicit implementation, and a resumed run repeats
them.

The memory use is linear in the length, because the backward pass only needs the inputs, the output
and one number per head and query. A bias is an exception: the bias and its gradient have one
element per head, query and key. A separate kernel computes the gradient of the bias.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR, batch_axes

TYPES = ("float16", "bfloat16", "float32")


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why these kernels do not support a call, or `None` if they do."""
    if spec.platform != "cuda":
        return "Triton kernels run on NVIDIA GPUs only"
    if spec.capability is None or spec.capability < (8, 0):
        return "it requires compute capability 8.0 or higher"
    if jnp.dtype(spec.dtype).name not in TYPES:
        return f"it supports {', '.join(TYPES)}, not {spec.dtype}"
    max_head_dim = _max_head_dim(spec.capability, spec.half)
    if spec.head_dim > max_head_dim:
        return f"head_dim {spec.head_dim} exceeds {max_head_dim}, the maximum on this GPU"
    if spec.mask is not None:
        return "it does not support dense masks"
    if spec.bias is not None and not _has_full_bias(spec):
        return f"a bias of shape {spec.bias} does not cover all heads, queries and keys"
    if spec.dropout >= 1.0:
        return "it does not support a dropout rate of 1"
    if spec.num_shards(SEQUENCE) > 1:
        return "the mesh splits sequences"
    if spec.batch % spec.num_shards(*BATCH_AXES):
        return (
            f"{spec.num_shards(*BATCH_AXES)} devices do not divide a batch of {spec.batch} evenly"
        )
    if spec.heads % spec.num_shards(TENSOR):
        return f"{spec.num_shards(TENSOR)} devices do not divide {spec.heads} heads evenly"
    return None


def _has_full_bias(spec: AttentionSpec) -> bool:
    """Returns whether the bias has the shape of the scores, with a batch axis of 1 or full size."""
    sizes = (spec.heads, spec.queries, spec.keys)
    return spec.bias in ((1, *sizes), (spec.batch, *sizes))


def _max_head_dim(capability: tuple[int, int], half: bool) -> int:
    """Returns the widest head whose tiles fit into the shared memory of a thread block."""
    if capability[0] in (9, 10):  # 227 KiB
        return 256
    return 128 if half or capability in ((8, 0), (8, 7)) else 64  # 163 KiB; 99 KiB


def flash_attention(call: AttentionCall, *, interpret: bool = False) -> jax.Array:
    """Computes attention in tiles. A fully masked query produces zeros and no gradient.

    Matrix multiplications have operands in the dtype of the inputs. Sums and the softmax are
    computed in float32. float32 inputs are multiplied in three TF32 passes, whose error is as small
    as that of float32. Over a mesh each device computes its own rows and heads. Devices communicate
    only to sum the gradient of a bias that all rows share.

    Args:
        call: The inputs, of any lengths. The bias must be `(1 or batch, heads, queries, keys)`.
        interpret: Whether to run the kernels as plain jax operations, on any platform.

    Returns:
        `(batch, queries, heads, head_dim)` in the dtype of the values.
    """
    from hfseq.nn.kernels import flash_tiles

    query, key, value, visible = call.query, call.key, call.value, call.visible
    bias, bits, mesh = call.bias, call.dropout_bits, call.mesh
    if visible.dense is not None:
        raise ValueError("flash attention does not support dense masks")
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        sizes = (query.shape[2], query.shape[1], key.shape[1])
        if bias.shape not in ((1, *sizes), (len(query), *sizes)):
            raise ValueError(
                f"flash attention requires a bias of shape (1 or batch, *{sizes}), not {bias.shape}"
            )
    threshold = min(round(call.dropout_rate * 65536), 65535) if bits is not None else 0
    left, right = visible.window or (None, None)
    form = flash_tiles.AttentionForm(
        call.scale, left, 0 if visible.causal else right, threshold, interpret
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
        seeds=bits.seeds() if bits is not None and threshold else None,
        bias=bias,
    )
    if mesh is None or mesh.size == 1:
        return flash_tiles.attention(form, query, key, value, rows)

    tensor_shards = mesh.shape.get(TENSOR, 1)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    if key.shape[2] % tensor_shards:
        key, value = (jnp.repeat(leaf, group, axis=2) for leaf in (key, value))

    def attend_local(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        rows: flash_tiles.RowArrays[jax.Array],
    ) -> jax.Array:
        if rows.seeds is not None and tensor_shards > 1:
            # The random bits are numbered over the global array. Skip the bits of the heads on
            # preceding devices.
            elements = heads // tensor_shards * query.shape[1] * key.shape[1]
            skipped = jax.lax.axis_index(TENSOR) * elements
            offset = rows.seeds[:, 2] + skipped.astype(jnp.uint32)
            rows = rows._replace(seeds=rows.seeds.at[:, 2].set(offset))
        return flash_tiles.attention(form, query, key, value, rows)

    batch = batch_axes(mesh) or None
    heads_spec = PartitionSpec(batch, None, TENSOR if TENSOR in mesh.axis_names else None)
    rows_spec = PartitionSpec(batch)
    bias_spec = None
    if bias is not None:
        bias_spec = PartitionSpec(batch if len(bias) > 1 else None, heads_spec[2])
    row_specs = flash_tiles.RowArrays(rows_spec, rows_spec, rows_spec, rows_spec, bias_spec)
    run = jax.shard_map(
        attend_local,
        mesh=mesh,
        in_specs=(heads_spec, heads_spec, heads_spec, row_specs),
        out_specs=heads_spec,
        check_vma=False,
    )
    return run(query, key, value, rows)
