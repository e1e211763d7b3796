"""Convolutions, normalization, pooling, interpolation and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfseq import nn
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
    letters = "DHW"[-n:]
    numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    if transposed:
        sizes = weight.shape[2:]
        weight = jnp.flip(weight, range(2, 2 + n))
        inputs, outputs = weight.shape[:2]
        weight = weight.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
        weight = weight.reshape(groups * outputs, inputs // groups, *sizes)
        pads = [
            (gap * (size - 1) - pad, gap * (size - 1) - pad + extra)
            for gap, size, pad, extra in zip(
                dilation, sizes, padding, _repeat(output_padding, n), strict=True
            )
        ]
        options: dict[str, Any] = {"window_strides": [1] * n, "lhs_dilation": stride}
    else:
        pads = [(pad, pad) for pad in padding]
        options = {"window_strides": stride}
    outputs_array = lax.conv_general_dilated(
        x,
        weight,
        padding=pads,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
        **options,
    )
    return outputs_array if bias is None else outputs_array + bias.reshape(-1, *(1,) * n)


# -- normalization
# ---------------------------------------------------------------------------------------


def _channels(x: Array | None, ndim: int) -> Any:
    return None if x is None else x.reshape(-1, *(1,) * (ndim - 2))


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _standardize(x: Array, axes: Dims, eps: float) -> tuple[Array, Array, Array]:
    """Returns float32 values with mean 0 and variance 1, the mean and the factor."""
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
        # PyTorch aligns queries and keys at their starts.
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


def _window(
    x: Array,
    size: Sizes,
    stride: Sizes,
    padding: int | Sizes,
    dilation: int | Sizes,
    ceil_mode: bool,
    n: int,
) -> tuple[list[int], list[int], list[int], list[tuple[int, int]]]:
    """Returns size, strides, dilations and padding of windows over all axes."""
    size = _repeat(size, n)
    stride = _repeat(stride, n) if stride else size
    padding, dilation = _repeat(padding, n), _repeat(dilation, n)
    lead = x.ndim - n
    pads = [(0, 0)] * lead
    for axis in range(n):
        total = x.shape[lead + axis] + 2 * padding[axis] - dilation[axis] * (size[axis] - 1) - 1
        count = total // stride[axis]
        if ceil_mode and total % stride[axis]:
            # The last window must begin inside the array or its left padding.
            begin = (count + 1) * stride[axis]
            count += begin < x.shape[lead + axis] + padding[axis]
        extra = max(count * stride[axis] - total, 0)
        pads.append((padding[axis], padding[axis] + extra))
    ones = [1] * lead
    return [*ones, *size], [*ones, *stride], [*ones, *dilation], pads


def _max_pool(
    n: int,
    x: Array,
    size: Sizes,
    stride: Sizes = (),
    padding: int | Sizes = 0,
    dilation: int | Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    windows, strides, dilations, pads = _window(x, size, stride, padding, dilation, ceil_mode, n)
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    # jax only differentiates windows whose initial value is not traced.
    initial = np.asarray(lowest, x.dtype)
    y = lax.reduce_window(x, initial, lax.max, windows, strides, pads, None, dilations)
    return y, jnp.zeros(y.shape, jnp.int32)


@operator("max_pool2d_with_indices")
def _max_pool2d(x: Array, *args: Any) -> tuple[Array, Array]:
    return _max_pool(2, x, *args)


@operator("max_pool3d_with_indices")
def _max_pool3d(x: Array, *args: Any) -> tuple[Array, Array]:
    return _max_pool(3, x, *args)


def _avg_pool(
    n: int,
    x: Array,
    size: Sizes,
    stride: Sizes = (),
    padding: int | Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    windows, strides, _, pads = _window(x, size, stride, padding, 1, ceil_mode, n)
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(x, zero, lax.add, windows, strides, pads)
    if divisor_override is not None:
        return total / divisor_override
    ones = jnp.ones_like(x)
    if count_include_pad:
        inner = [(0, 0)] * (x.ndim - n) + [(p, p) for p in _repeat(padding, n)]
        ones = jnp.pad(ones, inner, constant_values=1)
        pads = [(0, high - low) for low, high in pads]
    return total / lax.reduce_window(ones, zero, lax.add, windows, strides, pads)


@operator("avg_pool1d")
def _avg_pool1d(x: Array, *args: Any) -> Array:
    return _avg_pool(1, x, *args)


@operator("avg_pool2d")
def _avg_pool2d(x: Array, *args: Any) -> Array:
    return _avg_pool(2, x, *args)


@operator("avg_pool3d")
def _avg_pool3d(x: Array, *args: Any) -> Array:
    return _avg_pool(3, x, *args)


def _adaptive_pool(x: Array, size: Sizes, method: str) -> Array:
    for axis, count in zip(range(x.ndim - len(size), x.ndim), size, strict=True):
        length = x.shape[axis]
        if count == length:
            continue
        parts = [
            lax.slice_in_dim(x, i * length // count, -(-(i + 1) * length // count), axis=axis)
            for i in range(count)
        ]
        x = jnp.concatenate([getattr(p, method)(axis, keepdims=True) for p in parts], axis)
    return x


@operator("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive_avg_pool(x: Array, size: Sizes) -> Array:
    return _adaptive_pool(x, size, "mean")


@operator("adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_max_pool1d")
def _adaptive_max_pool(x: Array, size: Sizes) -> tuple[Array, Array]:
    y = _adaptive_pool(x, size, "max")
    return y, jnp.zeros(y.shape, jnp.int32)


# -- interpolation
# ---------------------------------------------------------------------------------------


def _cubic(distance: Any, a: float = -0.75) -> Any:
    """Computes the weights of cubic interpolation (Keys, 1981) for distances in elements."""
    library = np if isinstance(distance, np.ndarray) else jnp
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return library.where(d <= 1, near, library.where(d < 2, far, 0.0))


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1 - np.abs(distance))


def _resize_matrix(
    length: int, new: int, method: str, align_corners: bool, factor: float | None, antialias: bool
) -> np.ndarray:
    """Returns the matrix `(new, length)` that interpolates along an axis.

    PyTorch derives the step between samples from the factor that the caller gave, if there is one.
    """
    step = 1 / factor if factor else length / new
    if align_corners:
        step = (length - 1) / (new - 1) if new > 1 else 0.0
        centers = np.arange(new) * step
    else:
        centers = (np.arange(new) + 0.5) * step - 0.5
    matrix = np.zeros((new, length))
    if antialias:
        width = max(step, 1.0)
        distance = (np.arange(length)[None] - centers[:, None]) / width
        matrix = _triangle(distance) if method == "linear" else _cubic(distance, -0.5)
        return matrix / matrix.sum(1, keepdims=True)
    if method == "linear":
        centers = centers if align_corners else np.maximum(centers, 0)
        reach: tuple[int, ...] = (0, 1)
    else:
        reach = (-1, 0, 1, 2)
    low = np.floor(centers).astype(int)
    for offset in reach:
        weight = (
            _triangle(low + offset - centers)
            if method == "linear"
            else _cubic(low + offset - centers)
        )
        np.add.at(matrix, (np.arange(new), np.clip(low + offset, 0, length - 1)), weight)
    return matrix


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
    n = x.ndim - 2
    sizes, factors = _new_sizes(x, size, scales, n)
    y = x.astype(jnp.float32)
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        matrix = _resize_matrix(x.shape[axis], new, method, align_corners, factor, antialias)
        product = jnp.tensordot(y, jnp.asarray(matrix, jnp.float32), ((axis,), (1,)))
        y = jnp.moveaxis(product, -1, axis)
    return y.astype(x.dtype)


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
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        length = x.shape[axis]
        step = np.float32(1 / factor if factor else length / new)
        places = np.arange(new, dtype=np.float32) + np.float32(0.5 if is_exact else 0)
        index = np.minimum(np.floor(places * step).astype(int), length - 1)
        x = jnp.take(x, index, axis)
    return x


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
    height, width = x.shape[2:]

    def unnormalize(coordinate: Array, size: int) -> Array:
        if align_corners:
            return (coordinate + 1) / 2 * (size - 1)
        return ((coordinate + 1) * size - 1) / 2

    def into_image(place: Array, size: int) -> Array:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        if padding_mode == 1:
            place = jnp.clip(place, 0, size - 1)
        elif padding_mode == 2:
            span = high - low
            distance = jnp.abs(place - low)
            place = jnp.mod(distance, 2 * span)
            place = jnp.where(place > span, 2 * span - place, place) + low
            place = jnp.clip(place, 0, size - 1)
        return place

    px, py = unnormalize(grid[..., 0], width), unnormalize(grid[..., 1], height)

    def at(row: Array, column: Array) -> Array:
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        row = jnp.clip(row, 0, height - 1).astype(jnp.int32)
        column = jnp.clip(column, 0, width - 1).astype(jnp.int32)
        values = jax.vmap(lambda image, i, j: image[:, i, j])(x, row, column)
        return values * inside[:, None]

    if mode == 2:
        left, top = jnp.floor(px), jnp.floor(py)
        columns = [(into_image(left + i, width), _cubic(px - left - i)) for i in range(-1, 3)]
        rows = [(into_image(top + i, height), _cubic(py - top - i)) for i in range(-1, 3)]
        return sum(
            at(row, column) * (wy * wx)[:, None] for row, wy in rows for column, wx in columns
        )
    px, py = into_image(px, width), into_image(py, height)
    if mode == 1:
        return at(jnp.round(py), jnp.round(px))
    left, top = jnp.floor(px), jnp.floor(py)
    wx, wy = (px - left)[:, None], (py - top)[:, None]
    upper = at(top, left) * (1 - wx) + at(top, left + 1) * wx
    lower = at(top + 1, left) * (1 - wx) + at(top + 1, left + 1) * wx
    return upper * (1 - wy) + lower * wy
