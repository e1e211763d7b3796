"""Sharding rules of the VQ Transformer, and the sharding of its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hfseq import nn

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.blocks import AttentionInputs

#: The values and gates of a gated head are split by columns. Queries, keys and codes are not split.
RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"(v_proj|g_proj|up_proj)/kernel$", "column"),
    (r"(o_proj|down_proj)/kernel$", "row"),
    (r"(q_proj|k_proj|r_proj|score)/kernel$", "table"),
    (r"(content_bias|position_bias|position_scale)$", "replicated"),
    (r"norm/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head_bias$", "vocab"),
]

_ANY = PartitionSpec.UNCONSTRAINED


def split_heads(inputs: AttentionInputs) -> AttentionInputs:
    """Shards heads over the mesh axis `tensor`.

    If the number of key heads is a multiple of the axis size, key heads are sharded. Otherwise, if
    the number of query heads per key head is a multiple of the axis size, query heads are sharded,
    and every device has all values. If neither is the case, heads are not sharded, and the sharding
    rules only split the values of a head by columns.
    """
    mesh = nn.current_options().mesh
    axis_size = 1 if mesh is None else dict(mesh.shape).get("tensor", 1)
    if mesh is None or axis_size == 1:
        return inputs

    def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
        spec = PartitionSpec(_ANY, *axes, *(_ANY,) * (x.ndim - 1 - len(axes)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    heads, queries = inputs.query.shape[1:3]
    if heads % axis_size == 0:
        constrained = {
            name: constrain(getattr(inputs, name), "tensor") for name in inputs._fields[:4]
        }
        return inputs._replace(**constrained)
    if queries % axis_size == 0:
        value = NamedSharding(mesh, PartitionSpec(_ANY, None, _ANY, None))
        return inputs._replace(
            query=constrain(inputs.query, None, "tensor"),
            value=jax.lax.with_sharding_constraint(inputs.value, value),
        )
    return inputs


__all__ = ["RULES", "split_heads"]
