"""Convolutions, normalization, pooling, interpolation and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfseq import nn
from hfseq.nn import functional as F
from hfseq.nn.functional.resampling import resize, resize_nearest
from hfseq_plugins.bridge import state
from hfseq_plugins.bridge.operators.table import Dims, Sizes, operator

Array = jax.Array


def _repeat(value: int | Sequence[int], count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


# -- convolutions
# ---------------------------------------------------------------------------------------


@operator("convolution", "convolution_overrideable", "_convolution", "mkldnn_convolution")
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool = False,
    output_padding: Sizes = (0,),
    groups: int = 1,
    *_: Any,
) -> Array:
    """Computes a convolution with PyTorch's layout, `(batch, channels, *sizes)`."""
    if x.ndim == weight.ndim - 1:
        result = convolution(
            x[None], weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        return result[0]
    n = weight.ndim - 2
    stride, padding, dilation = (_repeat(value, n) for value in (stride, padding, dilation))
    if transposed:
        extra = _repeat(output_padding, n)
        return F.conv_transpose(x, weight, bias, stride, padding, extra, groups, dilation)
    return F.conv(x, weight, bias, stride, padding, dilation, groups)


# -- normalization
# ---------------------------------------------------------------------------------------


def _channels(x: Array | None, ndim: int) -> Any:
    return None if x is None else x.reshape(-1, *(1,) * (ndim - 2))


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _standardize(x: Array, axes: Dims, eps: float) -> tuple[Array, Array, Array]:
    """Returns float32 values with mean 0 and variance 1, the old mean, and the applied factor."""
    y = x.astype(jnp.float32)
    mean = y.mean(axes, keepdims=True)
    factor = lax.rsqrt(jnp.square(y - mean).mean(axes, keepdims=True) + eps)
    return (y - mean) * factor, mean, factor


@operator("native_layer_norm")
def _layer_norm(
    x: Array, shape: Sizes, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    y, mean, factor = _standardize(x, tuple(range(-len(shape), 0)), eps)
    return _affine(y, weight, bias).astype(x.dtype), mean, factor


@operator("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    rows: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    y, mean, factor = _standardize(x.reshape(x.shape[0], groups, -1), -1, eps)
    y = _affine(y.reshape(x.shape), _channels(weight, x.ndim), _channels(bias, x.ndim))
    return y.astype(x.dtype), mean[..., 0], factor[..., 0]


@operator("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    y = (x - _channels(mean, x.ndim)) * lax.rsqrt(_channels(variance, x.ndim) + eps)
    y = _affine(y, _channels(weight, x.ndim), _channels(bias, x.ndim))
    return y.astype(x.dtype), jnp.zeros(0), jnp.zeros(0)


@operator("_native_batch_norm_legit_functional")
def _batch_norm_training(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    variance: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    axes = (0, *range(2, x.ndim))
    batch_mean, batch_variance = x.mean(axes), x.var(axes)
    y = (x - _channels(batch_mean, x.ndim)) * lax.rsqrt(_channels(batch_variance, x.ndim) + eps)
    y = _affine(y, _channels(weight, x.ndim), _channels(bias, x.ndim)).astype(x.dtype)
    results = (y, batch_mean, lax.rsqrt(batch_variance + eps))
    if mean is None or variance is None:
        return (*results, None, None)
    count = x.size // x.shape[1]
    unbiased = batch_variance * count / max(count - 1, 1)
    batch_mean, unbiased = lax.stop_gradient((batch_mean, unbiased))
    new_mean = mean + momentum * (batch_mean - mean)
    return (*results, new_mean, variance + momentum * (unbiased - variance))


@operator("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    variance: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    if training or mean is None or variance is None:
        return _batch_norm_training(x, weight, bias, mean, variance, training, momentum, eps)
    return _batch_norm_inference(x, weight, bias, mean, variance, momentum, eps)


@operator("_weight_norm_interface", "_weight_norm")
def _weight_norm(direction: Array, size: Array, dim: int = 0) -> tuple[Array, Array]:
    axes = tuple(axis for axis in range(direction.ndim) if axis != dim % direction.ndim)
    norm = jnp.sqrt(jnp.square(direction).sum(axes, keepdims=True))
    return direction * (size / norm), norm


@operator("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm_training(x, weight, bias, None, None, True, momentum, eps)[:3]


@operator("rms_norm", "_fused_rms_norm")
def _rms_norm(x: Array, shape: Sizes, weight: Array | None = None, eps: float | None = None) -> Any:
    axes = tuple(range(-len(shape), 0))
    y = x.astype(jnp.float32)
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    factor = lax.rsqrt(jnp.square(y).mean(axes, keepdims=True) + eps)
    return _affine(y * factor, weight, None).astype(x.dtype), factor


# -- attention
# ---------------------------------------------------------------------------------------


@operator("_scaled_dot_product_flash_attention_for_cpu")
def _flash_attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    visible, bias = None, None
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
        visible, bias = (attn_mask, None) if attn_mask.dtype == bool else (None, attn_mask)
    if is_causal and query.shape[2] != key.shape[2]:
        # PyTorch's causal mask aligns the first query with the first key.
        visible = jnp.tril(jnp.ones((1, 1, query.shape[2], key.shape[2]), bool))
        is_causal = False
    q, k, v = (x.swapaxes(1, 2) for x in (query, key, value))
    output, _ = nn.attend(
        q,
        k,
        v,
        mask=visible,
        bias=bias,
        causal=is_causal,
        scale=scale,
        dropout_rate=dropout_p,
        rngs=state.current().keys,
    )
    return output.swapaxes(1, 2), jnp.zeros(query.shape[:3], jnp.float32)


# -- pooling
# ---------------------------------------------------------------------------------------


def _pool(
    function: Callable[..., Array],
    n: int,
    x: Array,
    sizes: Sequence[int | Sequence[int] | None],
    *options: Any,
) -> Array:
    """Calls a pooling function for an array with or without a batch axis.

    Args:
        function: A pooling function of `hfseq.nn.functional`.
        n: Number of axes that are pooled, which are the last ones.
        x: The inputs, `(batch, channels, *sizes)` or `(channels, *sizes)`.
        sizes: Arguments such as the window size and the stride. Each is a number for all pooled
            axes or a sequence with a number per axis. `None` is passed for an empty sequence.
        *options: Further arguments of the function.
    """
    repeated = [None if size in (None, [], ()) else _repeat(size, n) for size in sizes]
    y = function(x if x.ndim > n + 1 else x[None], *repeated, *options)
    return y if x.ndim > n + 1 else y[0]


def _max_pool(
    n: int,
    x: Array,
    size: Sizes,
    stride: Sizes = (),
    padding: int | Sizes = 0,
    dilation: int | Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    y = _pool(F.max_pool, n, x, (size, stride, padding, dilation), ceil_mode)
    return y, jnp.zeros(y.shape, jnp.int32)


@operator("max_pool2d_with_indices")
def _max_pool2d(x: Array, *args: Any) -> tuple[Array, Array]:
    return _max_pool(2, x, *args)


@operator("max_pool3d_with_indices")
def _max_pool3d(x: Array, *args: Any) -> tuple[Array, Array]:
    return _max_pool(3, x, *args)


def _add_avg_pool(n: int) -> None:
    @operator(f"avg_pool{n}d")
    def avg_pool(
        x: Array, size: Sizes, stride: Sizes = (), padding: int | Sizes = 0, *options: Any
    ) -> Array:
        return _pool(F.avg_pool, n, x, (size, stride, padding), *options)


for _count in (1, 2, 3):
    _add_avg_pool(_count)


@operator("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive_avg_pool(x: Array, size: Sizes) -> Array:
    return _pool(F.adaptive_avg_pool, len(size), x, (size,))


@operator("adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_max_pool1d")
def _adaptive_max_pool(x: Array, size: Sizes) -> tuple[Array, Array]:
    y = _pool(F.adaptive_max_pool, len(size), x, (size,))
    return y, jnp.zeros(y.shape, jnp.int32)


# -- interpolation
# ---------------------------------------------------------------------------------------


def _new_sizes(
    x: Array, size: Sizes, scales: Sequence[float] | None, n: int
) -> tuple[list[int], list[float | None]]:
    factors: list[Any] = list(scales) if scales else [None] * n
    if size is not None:
        return list(size), [None] * n if scales is None else factors
    return [math.floor(s * f) for s, f in zip(x.shape[2:], factors, strict=True)], factors


def _interpolate(
    x: Array,
    size: Sizes,
    scales: Sequence[float] | None,
    method: str,
    align_corners: bool = False,
    antialias: bool = False,
) -> Array:
    sizes, factors = _new_sizes(x, size, scales, x.ndim - 2)
    return resize(x, sizes, factors, method, align_corners, antialias)


def _add_interpolation(name: str, method: str, n: int) -> None:
    @operator(f"{name}.vec")
    def by_size_or_factor(
        x: Array,
        size: Sizes,
        align_corners: bool = False,
        scales: Sequence[float] | None = None,
    ) -> Array:
        return _interpolate(x, size, scales, method, align_corners, antialias=name.endswith("_aa"))

    @operator(f"{name}.default")
    def by_size(x: Array, size: Sizes, align_corners: bool = False, *factors: Any) -> Array:
        scales = factors if len(factors) == n and all(factors) else None
        return _interpolate(x, size, scales, method, align_corners, antialias=name.endswith("_aa"))


_add_interpolation("upsample_linear1d", "linear", 1)
_add_interpolation("upsample_bilinear2d", "linear", 2)
_add_interpolation("upsample_trilinear3d", "linear", 3)
_add_interpolation("upsample_bicubic2d", "cubic", 2)
_add_interpolation("_upsample_bilinear2d_aa", "linear", 2)
_add_interpolation("_upsample_bicubic2d_aa", "cubic", 2)


def _nearest(x: Array, size: Sizes, scales: Sequence[float] | None, is_exact: bool) -> Array:
    sizes, factors = _new_sizes(x, size, scales, x.ndim - 2)
    return resize_nearest(x, sizes, factors, is_exact)


def _add_nearest(name: str, n: int) -> None:
    is_exact = "exact" in name

    @operator(f"{name}.vec")
    def by_size_or_factor(x: Array, size: Sizes, scales: Sequence[float] | None = None) -> Array:
        return _nearest(x, size, scales, is_exact)

    @operator(f"{name}.default")
    def by_size(x: Array, size: Sizes, *factors: Any) -> Array:
        scales = factors if len(factors) == n and all(factors) else None
        return _nearest(x, size, scales, is_exact)


for _count in (1, 2, 3):
    _add_nearest(f"upsample_nearest{_count}d", _count)
    _add_nearest(f"_upsample_nearest_exact{_count}d", _count)


@operator("grid_sampler_2d", "grid_sampler")
def _grid_sampler(
    x: Array, grid: Array, mode: int = 0, padding_mode: int = 0, align_corners: bool = False
) -> Array:
    name = ("bilinear", "nearest", "bicubic")[mode]
    return F.grid_sample(
        x, grid, name, ("zeros", "border", "reflection")[padding_mode], align_corners
    )
