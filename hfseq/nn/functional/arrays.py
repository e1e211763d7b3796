"""Functions for shapes, indices and sorting, with the semantics of PyTorch's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from hfseq.nn.visible import Mask, Visibility, as_visibility

Array = jax.Array


class ValuesAndIndices(NamedTuple):
    """Elements that are selected along an axis, and their indices, as `torch.max` returns them."""

    values: Array
    indices: Array


# -- shapes


def expand(x: Array, *sizes: Any) -> Array:
    """Broadcasts `x` to the shape `sizes`. A size of -1 keeps the size of the axis."""
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    lead = len(shape) - x.ndim
    return jnp.broadcast_to(
        x, [x.shape[axis - lead] if size == -1 else size for axis, size in enumerate(shape)]
    )


def squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    """Removes axes of size 1, either all of them or only those that `dim` names."""
    axes = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


def flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    """Merges the axes from `start_dim` to `end_dim`, both included."""
    start, end = start_dim % x.ndim, end_dim % x.ndim
    merged = math.prod(x.shape[start : end + 1])
    return x.reshape(*x.shape[:start], merged, *x.shape[end + 1 :])


def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    """Splits an axis into several axes of the given sizes. One size may be -1."""
    axis = dim % x.ndim
    product = -math.prod(sizes) if -1 in sizes else math.prod(sizes)
    full = [x.shape[axis] // product if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:axis], *full, *x.shape[axis + 1 :])


def split(x: Array, sizes: int | Sequence[int], dim: int = 0) -> list[Array]:
    """Splits an axis into parts.

    Args:
        x: The array.
        sizes: The size of each part, or one size for all parts. With one size, the last part may be
            smaller.
        dim: The axis.
    """
    if isinstance(sizes, int):
        return jnp.split(x, list(range(sizes, x.shape[dim], sizes)), dim)
    return jnp.split(x, np.cumsum(np.asarray(sizes))[:-1].tolist(), dim)


def chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    """Splits an axis into at most `chunks` parts of the same size. The last may be smaller."""
    return split(x, -(-x.shape[dim] // chunks), dim)


def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    """Returns `length` elements of an axis, starting at `start`."""
    return lax.slice_in_dim(x, start, start + length, axis=dim)


def windows(x: Array, dim: int, size: int, step: int) -> Array:
    """Returns sliding windows of an axis, like PyTorch's `Tensor.unfold`.

    The axis `dim` becomes the axis of the windows. The elements of each window are on a new last
    axis.
    """
    axis = dim % x.ndim
    count = (x.shape[axis] - size) // step + 1
    index = np.arange(count)[:, None] * step + np.arange(size)
    return jnp.moveaxis(jnp.take(x, index, axis=axis), axis + 1, -1)


def meshgrid(*vectors: Array, indexing: str = "ij") -> list[Array]:
    """Returns the coordinates of a grid. Accepts vectors, or one sequence of vectors."""
    parts = vectors[0] if len(vectors) == 1 and not hasattr(vectors[0], "shape") else vectors
    return jnp.meshgrid(*parts, indexing=indexing)


def divide(x: Array, divisor: Any, rounding_mode: str | None = None) -> Array:
    """Divides `x`, and rounds the result down ("floor"), toward zero ("trunc") or not (`None`)."""
    if rounding_mode == "floor":
        return jnp.floor_divide(x, divisor)
    if rounding_mode == "trunc":
        return jnp.trunc(x / divisor).astype(jnp.result_type(x, divisor))
    return x / divisor


# -- selecting elements


def max(x: Array, dim: int, keepdim: bool = False) -> ValuesAndIndices:
    """Returns the maximum along an axis, and the index of the first element that equals it."""
    return _extremum(x, dim, keepdim, jnp.argmax)


def min(x: Array, dim: int, keepdim: bool = False) -> ValuesAndIndices:
    """Returns the minimum along an axis, and the index of the first element that equals it."""
    return _extremum(x, dim, keepdim, jnp.argmin)


def _extremum(x: Array, dim: int, keepdim: bool, function: Any) -> ValuesAndIndices:
    # As in PyTorch, only one of several equal elements gets the gradient.
    indices = function(x, dim, keepdims=True)
    values = jnp.take_along_axis(x, indices, dim)
    return ValuesAndIndices(
        *((values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim)))
    )


def topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> ValuesAndIndices:
    """Returns the `k` largest or smallest elements of an axis in order, and their indices."""
    moved = jnp.moveaxis(x, dim, -1)
    moved = moved.astype(jnp.int32) if moved.dtype == bool else moved
    _, indices = lax.top_k(moved if largest else -moved, k)
    indices = jnp.moveaxis(indices, -1, dim)
    return ValuesAndIndices(jnp.take_along_axis(x, indices, dim), indices)


def sort(
    x: Array, dim: int = -1, descending: bool = False, stable: bool = False
) -> ValuesAndIndices:
    """Sorts an axis. Equal elements keep their order."""
    indices = jnp.argsort(x, dim, stable=True, descending=descending)
    return ValuesAndIndices(jnp.take_along_axis(x, indices, dim), indices)


def cummax(x: Array, dim: int) -> ValuesAndIndices:
    """Returns the maximum of the elements up to each position, and the last index of it."""
    axis = dim % x.ndim
    values = lax.cummax(x, axis)
    positions = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return ValuesAndIndices(values, lax.cummax(jnp.where(x == values, positions, 0), axis))


# -- indices


def one_hot(x: Array, num_classes: int) -> Array:
    """Returns one-hot vectors in int32. PyTorch returns int64."""
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


def gather(x: Array, dim: int, index: Array) -> Array:
    """Selects one element of `x` for each index.

    Args:
        x: An array with as many axes as `index`. Its axes other than `dim` may be longer than those
            of `index`, in which case only their first elements are used.
        dim: The axis that `index` refers to.
        index: Integers, with the shape of the result.
    """
    axis = dim % x.ndim
    lead = tuple(slice(None if n == axis else size) for n, size in enumerate(index.shape))
    return jnp.take_along_axis(x[lead], index, axis, mode="clip")


def _grid(index: Array, dim: int) -> tuple[Array, ...]:
    grid = [lax.broadcasted_iota(jnp.int32, index.shape, axis) for axis in range(index.ndim)]
    grid[dim % index.ndim] = index
    return tuple(grid)


def _scatter(x: Array, dim: int, index: Array, source: Any, method: str) -> Array:
    if hasattr(source, "ndim") and source.ndim:
        source = source[tuple(slice(0, size) for size in index.shape)].astype(x.dtype)
    return getattr(x.at[_grid(index, dim)], method)(source)


def scatter(x: Array, dim: int, index: Array, source: Any) -> Array:
    """Returns a copy of `x` in which the element at each index is replaced.

    Args:
        x: The array to copy.
        dim: The axis that `index` refers to.
        index: Integers, with the number of axes of `x`.
        source: One number, or one element for each index. If an index occurs several times, it is
            not defined which of the elements is written.
    """
    return _scatter(x, dim, index, source, "set")


def scatter_add(x: Array, dim: int, index: Array, source: Any) -> Array:
    """Returns a copy of `x` to which the elements of `source` are added at their indices."""
    return _scatter(x, dim, index, source, "add")


_SCATTER_METHODS = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min", "mean": "add"}


def scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    """Combines the elements of `source` that have the same index.

    Args:
        x: The array to copy.
        dim: The axis that `index` refers to.
        index: Integers, with the number of axes of `x`.
        source: One element for each index.
        reduce: "sum", "prod", "mean", "amax" or "amin".
        include_self: Whether the element of `x` is also combined with those of `source`.
    """
    method, base = _SCATTER_METHODS[reduce], x
    if not include_self:
        is_written = _scatter(jnp.zeros(x.shape, bool), dim, index, True, "set")
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        lowest = -jnp.inf if is_float else jnp.iinfo(x.dtype).min
        highest = jnp.inf if is_float else jnp.iinfo(x.dtype).max
        neutral = {"add": 0, "multiply": 1, "max": lowest, "min": highest}[method]
        base = jnp.where(is_written, jnp.asarray(neutral, x.dtype), x)
    result = _scatter(base, dim, index, source, method)
    if reduce == "mean":
        count = _scatter(jnp.zeros(x.shape, x.dtype), dim, index, 1, "add")
        result = result / jnp.maximum(count + (1 if include_self else 0), 1)
    return result


def put(x: Array, index: Array, value: Any) -> Array:
    """Returns a copy of `x` in which `x[index]` is replaced by `value`.

    Args:
        x: The array to copy.
        index: Integers, or a boolean array over the first axes of `x`. The index may be a traced
            array, because the shape of the result does not depend on it.
        value: A value that broadcasts to one element `x[i]`. With a boolean index, it may also have
            one row for each true element.
    """
    value = jnp.asarray(value, x.dtype)
    if index.dtype != bool:
        return x.at[index].set(value)
    trailing = x.ndim - index.ndim
    mask = index.reshape(index.shape + (1,) * trailing)
    if value.ndim > trailing:
        row = jnp.maximum(jnp.cumsum(index.reshape(-1)) - 1, 0)
        value = jnp.take(value, row, axis=0, mode="clip").reshape(x.shape)
    return jnp.where(mask, value, x)


def _along(x: Array, dim: int, index: Array) -> Any:
    return x.at[(*(slice(None),) * (dim % x.ndim), index)]


def index_add(x: Array, dim: int, index: Array, source: Array, alpha: float = 1) -> Array:
    """Returns a copy of `x` to which `alpha * source` is added at the given indices of an axis."""
    return _along(x, dim, index).add((alpha * source).astype(x.dtype))


def index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    """Returns a copy of `x` in which `source` replaces the given indices of an axis."""
    return _along(x, dim, index).set(source.astype(x.dtype))


def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """Returns a copy of `x` in which the elements of `source` replace those where `mask` is true.

    The n-th element of `source` replaces the n-th such element of `x`.
    """
    flat = jnp.broadcast_to(mask, x.shape).reshape(-1)
    position = jnp.maximum(jnp.cumsum(flat) - 1, 0)
    values = jnp.take(source.reshape(-1), position, mode="clip").astype(x.dtype)
    return jnp.where(flat, values, x.reshape(-1)).reshape(x.shape)


def additive_mask(
    mask: Mask,
    dtype: DTypeLike = jnp.float32,
    *,
    causal: bool = False,
    shape: tuple[int, int] | None = None,
) -> jax.Array | None:
    """Converts an attention mask to the mask that eager attention adds to the scores.

    Args:
        mask: True where a key is visible, or `None` if all keys are visible. With `shape`, it may
            also be a description from `hfseq.nn.visible`.
        dtype: Data type of the result.
        causal: With `shape`, whether a query may only attend to keys at or before its position.
        shape: Number of queries and number of keys.

    Returns:
        0 where a key is visible, and the smallest finite number elsewhere. `None` if all keys are
        visible.
    """
    if shape is not None:
        mask = as_visibility(mask, causal).array(*shape)
    assert not isinstance(mask, Visibility)
    return None if mask is None else jnp.where(mask, 0, jnp.finfo(dtype).min).astype(dtype)
