"""Operators that read and write elements of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from hfseq.nn import functional as F
from hfseq_plugins.bridge.operators.table import Function, operator

Array = jax.Array


@operator("embedding")
def _embedding(weight: Array, index: Array, padding_idx: int = -1, *_: Any) -> Array:
    rows = jnp.take(weight, index, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    # In PyTorch, the embedding of the padding token has no gradient.
    is_padding = (index == padding_idx)[..., None]
    return jnp.where(is_padding, lax.stop_gradient(rows), rows)


@operator("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, ...]:
    if mode != 0 or padding_idx >= 0:
        raise NotImplementedError("embedding_bag with padding or with a mode other than 'sum'")
    bags = len(offsets) - include_last_offset
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(len(indices)), side="right") - 1
    sums = jax.ops.segment_sum(rows, bag, bags, indices_are_sorted=True)
    return sums, bag, jnp.bincount(bag, length=bags), jnp.zeros(0, jnp.int32)


@operator("index_select")
def _index_select(x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, index, axis=dim, mode="clip")


@operator("gather")
def _gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    return F.gather(x, dim, index) if x.ndim else x


@operator("take_along_dim")
def _take_along_dim(x: Array, index: Array, dim: int | None = None) -> Array:
    return jnp.take_along_axis(x, index, dim)


@operator("take")
def _take(x: Array, index: Array) -> Array:
    return x.reshape(-1)[index]


def _place(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@operator("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_place(indices)]


@operator("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    x: Array,
    indices: Sequence[Array | None],
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Array:
    values = values.astype(x.dtype)
    masks = [index for index in indices if index is not None and index.dtype == bool]
    if masks and len(indices) == 1:
        return _masked_put(x, masks[0], values, accumulate)
    at = x.at[_place(indices)]
    return at.add(values) if accumulate else at.set(values)


def _masked_put(x: Array, mask: Array, values: Array, accumulate: bool) -> Array:
    """Computes `x[mask] = values` without arrays whose shape depends on the mask.

    The n-th element of `x` for which the mask is true is set to `values[n]`.
    """
    rest = x.shape[mask.ndim :]
    wide = mask.reshape(mask.shape + (1,) * len(rest))
    if values.ndim <= len(rest) or values.shape[0] == 1:
        value = values if values.ndim <= len(rest) else values[0]
        value = jnp.broadcast_to(value, x.shape)
    else:
        row = jnp.maximum(jnp.cumsum(mask.reshape(-1)) - 1, 0)
        value = jnp.take(values, row, axis=0, mode="clip").reshape(x.shape)
    return jnp.where(wide, x + value if accumulate else value, x)


def _scatter(function: Function, x: Array, dim: int, index: Array, *args: Any) -> Array:
    """Calls a scatter function of `hfseq.nn.functional`. Scalars are treated as vectors."""
    if x.ndim:
        return function(x, dim, index, *args)
    return function(x[None], dim, jnp.atleast_1d(index), *args)[0]


@operator("scatter.src", "scatter.value")
def _scatter_set(x: Array, dim: int, index: Array, source: ArrayLike) -> Array:
    return _scatter(F.scatter, x, dim, index, source)


@operator("scatter_add")
def _scatter_add(x: Array, dim: int, index: Array, source: ArrayLike) -> Array:
    return _scatter(F.scatter_add, x, dim, index, source)


@operator("scatter.reduce", "scatter.value_reduce")
def _scatter_reduce_name(x: Array, dim: int, index: Array, source: ArrayLike, reduce: str) -> Array:
    name = {"add": "sum", "multiply": "prod"}[reduce]
    return _scatter(F.scatter_reduce, x, dim, index, source, name)


@operator("scatter_reduce.two")
def _scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    return _scatter(F.scatter_reduce, x, dim, index, source, reduce, include_self)


operator("index_add")(F.index_add)
operator("index_copy")(F.index_copy)
operator("masked_scatter")(F.masked_scatter)


@operator("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(x: Array, dim: int, index: Array, value: ArrayLike) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(value)


@operator("one_hot")
def _one_hot(x: Array, num_classes: int = -1) -> Array:
    return F.one_hot(x, num_classes)


@operator("searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(
    edges: Array,
    x: Array,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    side = side or ("right" if right else "left")
    if edges.ndim == 1:
        return jnp.searchsorted(edges, x, side=side)
    rows = edges.reshape(-1, edges.shape[-1])
    search = jax.vmap(lambda row, values: jnp.searchsorted(row, values, side=side))
    return search(rows, x.reshape(len(rows), -1)).reshape(x.shape)


@operator("bucketize.Tensor")
def _bucketize(x: Array, edges: Array, out_int32: bool = False, right: bool = False) -> Array:
    return jnp.searchsorted(edges, x, side="right" if right else "left")


@operator("repeat_interleave.self_int")
def _repeat_interleave(
    x: Array, repeats: int, dim: int | None = None, output_size: int | None = None
) -> Array:
    return jnp.repeat(x, repeats, dim)


@operator("repeat_interleave.self_Tensor")
def _repeat_interleave_tensor(
    x: Array, repeats: Array, dim: int | None = None, output_size: int | None = None
) -> Array:
    return jnp.repeat(x, repeats, dim, total_repeat_length=output_size)


@operator("repeat_interleave.Tensor")
def _repeat_interleave_counts(repeats: Array, output_size: int | None = None) -> Array:
    return jnp.repeat(
        jnp.arange(len(repeats), dtype=jnp.int32), repeats, total_repeat_length=output_size
    )
