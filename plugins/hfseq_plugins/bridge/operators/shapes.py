"""Operators that create arrays and change shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from hfseq.nn import functional as F
from hfseq_plugins.bridge.operators.table import Dims, Sizes, add_all, operator

Array = jax.Array


def _dim(x: Array, dim: int) -> int:
    return dim % x.ndim if x.ndim else 0


@operator("view", "reshape", "_unsafe_view", "_reshape_alias")
def _view(x: Array, shape: Sizes, *_: Any) -> Array:
    return x.reshape(tuple(shape))


@operator("view.dtype")
def _view_dtype(x: Array, dtype: Any) -> Array:
    from hfseq_plugins.bridge.dtypes import JAX_DTYPES

    return lax.bitcast_convert_type(x, JAX_DTYPES.get(dtype, dtype))


add_all(
    {
        "permute": lambda x, dims: x.transpose([d % x.ndim for d in dims]),
        "transpose.int": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
        "t numpy_T adjoint": lambda x: x.T,
        "unsqueeze": jnp.expand_dims,
        "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
        "roll": lambda x, shifts, dims=(): _roll(x, shifts, dims),
        "rot90": lambda x, k=1, dims=(0, 1): jnp.rot90(x, k, tuple(dims)),
        "repeat": lambda x, repeats: jnp.tile(x, tuple(repeats)),
        "tile": lambda x, repeats: jnp.tile(x, tuple(repeats)),
        "stack": lambda xs, dim=0: jnp.stack(_common(xs), dim),
        "select.int": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
        "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
        "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
        "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
        "linalg_diagonal": lambda x, *, offset=0, dim1=-2, dim2=-1: jnp.diagonal(
            x, offset, dim1, dim2
        ),
        "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
        "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
        "split_with_sizes": lambda x, sizes, dim=0: jnp.split(
            x, np.cumsum(sizes)[:-1].tolist(), dim
        ),
        "unbind.int": lambda x, dim=0: [
            lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])
        ],
        "meshgrid meshgrid.indexing": lambda xs, indexing="ij": jnp.meshgrid(
            *xs, indexing=indexing
        ),
    }
)


def _common(arrays: Sequence[Array]) -> list[Array]:
    """Converts arrays to a common data type. As in PyTorch, no array is weakly typed."""
    dtype = jnp.result_type(*(x.dtype for x in arrays))
    return [x.astype(dtype) for x in arrays]


@operator("cat", "concat", "concatenate")
def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    # PyTorch ignores empty vectors, whatever the shapes of the other arrays are.
    kept = [x for x in arrays if x.shape != (0,)] or list(arrays)
    return jnp.concatenate(_common(kept), dim)


def _roll(x: Array, shifts: Sizes, dims: Sizes = ()) -> Array:
    return jnp.roll(x, shifts, tuple(dims) or None)


@operator("squeeze.dim", "squeeze.dims", "squeeze.default")
def _squeeze(x: Array, dims: Dims = None) -> Array:
    return F.squeeze(x, dims) if x.ndim else x


@operator("expand")
def _expand(x: Array, shape: Sizes, implicit: bool = False) -> Array:
    return F.expand(x, shape)


def _slice_of(
    x: Array, dim: int, start: int | None, end: int | None, step: int
) -> tuple[slice, ...]:
    place = [slice(None)] * x.ndim
    place[dim] = slice(start, None if end is None or end > 2**60 else end, step)
    return tuple(place)


@operator("slice.Tensor")
def _slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x[_slice_of(x, dim, start, end, step)]


@operator("narrow")
def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    return lax.slice_in_dim(x, start, start + length, axis=dim)


@operator("split.Tensor")
def _split(x: Array, size: int, dim: int = 0) -> list[Array]:
    return jnp.split(x, list(range(size, x.shape[dim], size)), dim)


@operator("slice_scatter")
def _slice_scatter(
    x: Array,
    source: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    return x.at[_slice_of(x, dim, start, end, step)].set(source.astype(x.dtype))


@operator("select_scatter")
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = index
    return x.at[tuple(place)].set(source.astype(x.dtype))


@operator("constant_pad_nd", "pad")
def pad(x: Array, sizes: Sizes, mode: str = "constant", value: float | None = None) -> Array:
    """Pads an array. As in PyTorch, the first two numbers in `sizes` refer to the last axis."""
    if not isinstance(mode, str):
        mode, value = "constant", mode
    return F.pad(x, sizes, mode, value)


operator("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")(
    lambda x, sizes: pad(x, sizes, "reflect")
)
operator("replication_pad1d", "replication_pad2d", "replication_pad3d")(
    lambda x, sizes: pad(x, sizes, "replicate")
)


@operator("as_strided")
def _as_strided(x: Array, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Array:
    index = np.full((), storage_offset or 0)
    for count, step in zip(size, stride, strict=True):
        index = index[..., None] + np.arange(count) * step
    return x.reshape(-1)[index]


@operator("unfold")
def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    return F.windows(x, dim, size, step)


operator("im2col")(F.unfold)
operator("col2im")(F.fold)


@operator("diag_embed")
def _diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    size = x.shape[-1] + abs(offset)
    row = np.arange(x.shape[-1]) + max(-offset, 0)
    column = np.arange(x.shape[-1]) + max(offset, 0)
    matrix = jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., row, column].set(x)
    return jnp.moveaxis(matrix, (-2, -1), (dim1, dim2))


operator("pixel_shuffle")(F.pixel_shuffle)
operator("pixel_unshuffle")(F.pixel_unshuffle)


# -- new arrays
# ---------------------------------------------------------------------------------------


def _clip_integer(value: ArrayLike, dtype: DTypeLike | None) -> Any:
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer) and isinstance(value, int):
        limits = np.iinfo(dtype)
        return min(max(value, limits.min), limits.max)
    return value


@operator("full_like")
def _full_like(x: Array, value: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    return jnp.full_like(x, _clip_integer(value, dtype or x.dtype), dtype=dtype)


@operator("new_full")
def _new_full(x: Array, shape: Sizes, value: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    return jnp.full(tuple(shape), _clip_integer(value, dtype or x.dtype), dtype or x.dtype)


@operator("full")
def _full(shape: Sizes, value: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    if dtype is None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        dtype = jnp.int32 if is_integer else None
    return jnp.full(tuple(shape), value, dtype)


add_all(
    {
        "zeros_like empty_like": lambda x, dtype=None: jnp.zeros_like(x, dtype=dtype),
        "ones_like": lambda x, dtype=None: jnp.ones_like(x, dtype=dtype),
        "new_zeros new_empty new_empty_strided": lambda x, shape, *_, dtype=None: jnp.zeros(
            tuple(shape), dtype or x.dtype
        ),
        "new_ones": lambda x, shape, dtype=None: jnp.ones(tuple(shape), dtype or x.dtype),
        "scalar_tensor": lambda value, dtype=None: jnp.asarray(value, dtype),
        "arange": lambda end, dtype=None: jnp.arange(end, dtype=dtype),
        "arange.start": lambda start, end, dtype=None: jnp.arange(start, end, dtype=dtype),
        "arange.start_step": lambda start, end, step=1, dtype=None: jnp.arange(
            start, end, step, dtype
        ),
    }
)


@operator("linspace", "linspace.Tensor_Tensor", "linspace.Scalar_Tensor", "linspace.Tensor_Scalar")
def _linspace(
    start: ArrayLike, end: ArrayLike, steps: int, dtype: DTypeLike | None = None
) -> Array:
    return jnp.linspace(start, end, steps, dtype=dtype or jnp.float32)
