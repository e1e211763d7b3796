"""Operators that reduce, accumulate or sort elements along axes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfseq.nn import functional as F
from hfseq_plugins.bridge.operators.table import Dims, Function, add_all, operator

Array = jax.Array


def _axes(dim: Dims) -> Any:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return None
    return tuple(dim) if isinstance(dim, list | tuple) else dim


def _summable(x: Array) -> Array:
    """Converts booleans and small integers as PyTorch does before it sums them."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.int32)


def _integers(x: Array) -> Array:
    return x.astype(jnp.int32)


@operator("sum.dim_IntList", "sum.default")
def _sum(
    x: Array, dim: Dims = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    return _summable(x).sum(_axes(dim), keepdims=keepdim, dtype=dtype)


@operator("nansum")
def _nansum(
    x: Array, dim: Dims = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    return jnp.nansum(x, _axes(dim), keepdims=keepdim, dtype=dtype)


@operator("mean.dim", "mean.default")
def _mean(
    x: Array, dim: Dims = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    return x.mean(_axes(dim), keepdims=keepdim, dtype=dtype)


@operator("prod.default", "prod.dim_int")
def _prod(
    x: Array, dim: Dims = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    return _summable(x).prod(_axes(dim), keepdims=keepdim, dtype=dtype)


add_all(
    {
        "amax": lambda x, dim=(), keepdim=False: x.max(_axes(dim), keepdims=keepdim),
        "amin": lambda x, dim=(), keepdim=False: x.min(_axes(dim), keepdims=keepdim),
        "aminmax": lambda x, dim=None, keepdim=False: (
            x.min(dim, keepdims=keepdim),
            x.max(dim, keepdims=keepdim),
        ),
        "max": lambda x: x.max(),
        "min": lambda x: x.min(),
        "any any.dim any.dims": lambda x, dim=None, keepdim=False: (x != 0).any(
            _axes(dim), keepdims=keepdim
        ),
        "all all.dim all.dims": lambda x, dim=None, keepdim=False: (x != 0).all(
            _axes(dim), keepdims=keepdim
        ),
        "_is_all_true": lambda x: x.all(),
        "_is_any_true": lambda x: x.any(),
        "argmax": lambda x, dim=None, keepdim=False: _argument(x, dim, keepdim, jnp.argmax),
        "argmin": lambda x, dim=None, keepdim=False: _argument(x, dim, keepdim, jnp.argmin),
        "cumsum": lambda x, dim, dtype=None: (
            jnp.cumsum(_summable(x), dim, dtype=dtype) if x.ndim else x
        ),
        "cumprod": lambda x, dim, dtype=None: jnp.cumprod(x, dim, dtype=dtype),
        "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
        "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(
            x, _axes(dim), keepdims=keepdim
        ),
        "median": lambda x: jnp.sort(x.reshape(-1))[(x.size - 1) // 2],
        "count_nonzero count_nonzero.dim_IntList": lambda x, dim=None: _integers(x != 0).sum(
            _axes(dim)
        ),
        "bincount": lambda x, weights=None, minlength=0: _bincount(x, weights, minlength),
    }
)


def _argument(x: Array, dim: int | None, keepdim: bool, function: Function) -> Array:
    return function(x, dim, keepdims=keepdim and dim is not None)


def _bincount(x: Array, weights: Array | None, minlength: int) -> Array:
    # PyTorch's result is longer if a value is at least minlength. This is ignored, because the
    # shape of a traced array must not depend on values.
    return jnp.bincount(x, weights, length=minlength)


def _selected(function: Function, x: Array, *args: Any, **kwargs: Any) -> tuple[Array, Array]:
    """Calls a function that returns values and their indices. Scalars have the index 0."""
    values, indices = function(x, *args, **kwargs) if x.ndim else (x, jnp.zeros((), jnp.int32))
    return values, indices


_SELECTIONS: dict[str, Function] = {
    "max.dim": F.max,
    "min.dim": F.min,
    "topk": F.topk,
    "sort.default": F.sort,
    "sort.stable": F.sort,
    "cummax": F.cummax,
}
for _name, _function in _SELECTIONS.items():
    operator(_name)(functools.partial(_selected, _function))


@operator("median.dim", "nanmedian.dim")
def _median_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    index = jnp.take(jnp.argsort(x, dim), jnp.array([(x.shape[dim] - 1) // 2]), axis=dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@operator("cummin")
def _cummin(x: Array, dim: int) -> tuple[Array, Array]:
    values = lax.cummin(x, dim % x.ndim)
    places = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    return values, lax.cummax(jnp.where(x == values, places, 0), dim % x.ndim)


@operator("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def vector_norm(
    x: Array,
    order: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes a norm. The gradient of the norm of zeros is zero, as in PyTorch."""
    return F.norm(x, order, _axes(dim), keepdim, dtype)


@operator("linalg_norm")
def _linalg_norm(
    x: Array,
    order: float | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    return vector_norm(x, order, dim, keepdim, dtype)


@operator("var.correction", "var.dim", "var.default")
def variance(
    x: Array,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: int | None = 1,
) -> Array:
    """Computes the variance."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    ddof = correction if unbiased is None else int(unbiased)
    return x.var(_axes(dim), ddof=1 if ddof is None else ddof, keepdims=keepdim)


@operator("std.correction", "std.dim", "std.default")
def _std(x: Array, *args: Any, **kwargs: Any) -> Array:
    return jnp.sqrt(variance(x, *args, **kwargs))


@operator("var_mean.correction", "var_mean.dim")
def _var_mean(
    x: Array, dim: Dims = None, keepdim: bool = False, correction: int | None = 1
) -> tuple[Array, Array]:
    mean = x.mean(_axes(dim), keepdims=keepdim)
    return variance(x, dim, None, keepdim, correction), mean


@operator("std_mean.correction")
def _std_mean(
    x: Array, dim: Dims = None, keepdim: bool = False, correction: int | None = 1
) -> tuple[Array, Array]:
    squares, mean = _var_mean(x, dim, keepdim, correction)
    return jnp.sqrt(squares), mean


@operator("kthvalue")
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    index = jnp.take(jnp.argsort(x, dim), jnp.array([k - 1]), axis=dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@operator("argsort.default", "argsort.stable")
def _argsort(
    x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> Array:
    return jnp.argsort(x, dim, stable=True, descending=descending)


@operator("quantile", "quantile.scalar")
def _quantile(
    x: Array,
    q: Array | float,
    dim: int | None = None,
    keepdim: bool = False,
    interpolation: str = "linear",
) -> Array:
    return jnp.quantile(x, q, dim, keepdims=keepdim, method=interpolation)


@operator("_softmax", "softmax.int")
def _softmax(x: Array, dim: int, dtype: DTypeLike | None = None) -> Array:
    x = x if dtype is None or isinstance(dtype, bool) else x.astype(dtype)
    return jax.nn.softmax(x, dim)


@operator("_log_softmax", "log_softmax.int")
def _log_softmax(x: Array, dim: int, dtype: DTypeLike | None = None) -> Array:
    x = x if dtype is None or isinstance(dtype, bool) else x.astype(dtype)
    return jax.nn.log_softmax(x, dim)


@operator("_safe_softmax")
def _safe_softmax(x: Array, dim: int, dtype: DTypeLike | None = None) -> Array:
    x = x if dtype is None else x.astype(dtype)
    is_masked = (x == -jnp.inf).all(dim, keepdims=True)
    return jnp.where(is_masked, 0, jax.nn.softmax(jnp.where(is_masked, 0, x), dim))
