"""Padding, convolutions and pooling with the semantics of PyTorch's functions.

Arrays have the layout `(batch, channels, *sizes)` with any number of sizes. For example, `conv`
replaces PyTorch's `conv1d`, `conv2d` and `conv3d`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfseq.nn.layers import per_axis

Array = jax.Array
#: One number for all axes, or one number per axis.
Sizes = int | Sequence[int]

_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """Pads an array.

    Args:
        x: The array.
        pad: The numbers of elements to add before and after the last axis, then before and after
            the second-to-last axis, and so on. Negative numbers remove elements.
        mode: "constant", "reflect", "replicate" or "circular".
        value: The value of the added elements in the mode "constant". Default: 0.
    """
    pairs = [(0, 0)] * x.ndim
    for n in range(len(pad) // 2):
        pairs[x.ndim - 1 - n] = (pad[2 * n], pad[2 * n + 1])
    if mode == "constant":
        number = jnp.asarray(0 if value is None else value, x.dtype)
        return lax.pad(x, number, [(low, high, 0) for low, high in pairs])
    if any(low < 0 or high < 0 for low, high in pairs):
        cuts = [(min(low, 0), min(high, 0), 0) for low, high in pairs]
        x = lax.pad(x, jnp.zeros((), x.dtype), cuts)
        pairs = [(max(low, 0), max(high, 0)) for low, high in pairs]
    return jnp.pad(x, pairs, mode=_PAD_MODES[mode])


def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """Computes a convolution.

    Args:
        x: `(batch, in channels, *sizes)`.
        weight: `(out channels, in channels / groups, *kernel sizes)`.
        bias: `(out channels,)`, or `None`.
        stride: Distance between windows.
        padding: Number of zeros before and after each axis, or "same" or "valid".
        dilation: Distance between the elements of a window.
        groups: Number of channel groups.
    """
    n = weight.ndim - 2
    gaps = per_axis(dilation, n)
    if padding == "same":
        totals = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[2:], strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        counts = per_axis(0 if isinstance(padding, str) else padding, n)
        pads = [(count, count) for count in counts]
    options = {"window_strides": per_axis(stride, n), "rhs_dilation": gaps}
    return _convolve(x, weight.astype(x.dtype), bias, pads, groups, options)


def _convolve(
    x: Array, weight: Array, bias: Array | None, pads: Any, groups: int, options: dict[str, Any]
) -> Array:
    letters = "DHW"[-(weight.ndim - 2) :]
    y = lax.conv_general_dilated(
        x,
        weight,
        padding=pads,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=groups,
        **options,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * len(letters)).astype(y.dtype)


def conv_transpose(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """Computes a transposed convolution, which enlarges each axis by about the factor `stride`.

    Args:
        x: `(batch, in channels, *sizes)`.
        weight: `(in channels, out channels / groups, *kernel sizes)`.
        bias: `(out channels,)`, or `None`.
        stride: Factor by which each axis is enlarged.
        padding: Number of elements that are removed at both ends of each axis.
        output_padding: Number of additional elements at the end of each axis.
        groups: Number of channel groups.
        dilation: Distance between the elements of a window.
    """
    n, sizes = weight.ndim - 2, weight.shape[2:]
    gaps, extras = per_axis(dilation, n), per_axis(output_padding, n)
    flipped = jnp.flip(weight.astype(x.dtype), range(2, 2 + n))
    inputs, outputs = flipped.shape[:2]
    kernel = flipped.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
    kernel = kernel.reshape(groups * outputs, inputs // groups, *sizes)
    reach = [gap * (size - 1) for gap, size in zip(gaps, sizes, strict=True)]
    pads = [
        (far - cut, far - cut + extra)
        for far, cut, extra in zip(reach, per_axis(padding, n), extras, strict=True)
    ]
    options = {
        "window_strides": [1] * n,
        "lhs_dilation": per_axis(stride, n),
        "rhs_dilation": gaps,
    }
    return _convolve(x, kernel, bias, pads, groups, options)


def _window(
    x: Array, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, n: int
) -> tuple[list[int], list[int], list[int], list[tuple[int, int]]]:
    """Returns the size, stride, dilation and padding of a window for all axes of `x`."""
    size = list(per_axis(size, n))
    stride = per_axis(stride, n) if stride else size
    padding, dilation = per_axis(padding, n), per_axis(dilation, n)
    lead = x.ndim - n
    pads = [(0, 0)] * lead
    for axis in range(n):
        length = x.shape[lead + axis] + 2 * padding[axis]
        if ceil_mode and dilation[axis] == 1:
            size[axis] = min(size[axis], length)  # a window beyond both ends has the same elements
        total = length - dilation[axis] * (size[axis] - 1) - 1
        count = total // stride[axis]
        if ceil_mode and total % stride[axis]:
            # The last window must begin inside the array or its left padding.
            begin = (count + 1) * stride[axis]
            count += begin < x.shape[lead + axis] + padding[axis]
        extra = max(count * stride[axis] - total, 0)
        pads.append((padding[axis], padding[axis] + extra))
    ones = [1] * lead
    return [*ones, *size], [*ones, *stride], [*ones, *dilation], pads


def max_pool(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Array:
    """Returns the maximum of each window.

    Args:
        x: `(batch, channels, *sizes)`.
        kernel_size: Size of the windows.
        stride: Distance between windows. Default: `kernel_size`.
        padding: Number of elements that are added before and after each axis. An added element is
            never the maximum.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether the last window may extend beyond the end of the padded array.
    """
    n = x.ndim - 2
    sizes, strides, dilations, pads = _window(
        x, kernel_size, stride, padding, dilation, ceil_mode, n
    )
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return lax.reduce_window(
        x, np.asarray(lowest, x.dtype), lax.max, sizes, strides, pads, None, dilations
    )


def avg_pool(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """Returns the mean of each window.

    Args:
        x: `(batch, channels, *sizes)`.
        kernel_size: Size of the windows.
        stride: Distance between windows. Default: `kernel_size`.
        padding: Number of zeros before and after each axis.
        ceil_mode: Whether the last window may extend beyond the end of the padded array.
        count_include_pad: Whether the mean includes the zeros of `padding`.
        divisor_override: Divisor of the sums. Default: the number of elements of the window.
    """
    n = x.ndim - 2
    sizes, strides, _, pads = _window(x, kernel_size, stride, padding, 1, ceil_mode, n)
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(x, zero, lax.add, sizes, strides, pads)
    if divisor_override is not None:
        return total / divisor_override
    # The number of elements in each window is the product of the numbers along the axes.
    counts = np.ones(())
    for axis, margin in enumerate(per_axis(padding, n), x.ndim - n):
        start = np.arange(total.shape[axis]) * strides[axis] - margin
        margin *= count_include_pad
        end = np.minimum(start + sizes[axis], x.shape[axis] + margin)
        counts = counts[..., None] * (end - np.maximum(start, -margin))
    return total / counts.astype(x.dtype)


def _adaptive_pool(x: Array, output_size: Any, method: str) -> Array:
    n = x.ndim - 2
    sizes = [output_size] * n if output_size is None else per_axis(output_size, n)
    for axis, count in enumerate(sizes, 2):
        length = x.shape[axis]
        if count in (None, length):
            continue
        if length % count == 0:
            shape = (*x.shape[:axis], count, length // count, *x.shape[axis + 1 :])
            x = getattr(x.reshape(shape), method)(axis + 1)
            continue
        parts = [
            lax.slice_in_dim(x, i * length // count, -(-(i + 1) * length // count), axis=axis)
            for i in range(count)
        ]
        x = jnp.concatenate([getattr(part, method)(axis, keepdims=True) for part in parts], axis)
    return x


def adaptive_avg_pool(x: Array, output_size: Any) -> Array:
    """Divides each axis into `output_size` parts and returns the mean of each part.

    Args:
        x: `(batch, channels, *sizes)`.
        output_size: The number of parts of each axis, or one number for all. `None` keeps an axis.
    """
    return _adaptive_pool(x, output_size, "mean")


def adaptive_max_pool(x: Array, output_size: Any) -> Array:
    """Divides each axis into `output_size` parts and returns the maximum of each part.

    Args:
        x: `(batch, channels, *sizes)`.
        output_size: The number of parts of each axis, or one number for all. `None` keeps an axis.
    """
    return _adaptive_pool(x, output_size, "max")


def unfold(
    x: Array, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Array:
    """Returns the sliding windows of images, each as one column.

    Args:
        x: `(batch, channels, height, width)`.
        kernel_size: Size of the windows.
        dilation: Distance between the elements of a window.
        padding: Number of zeros before and after each axis.
        stride: Distance between windows.

    Returns:
        `(batch, channels * window elements, windows)`.
    """
    counts = per_axis(padding, 2)
    padded = jnp.pad(x, ((0, 0), (0, 0), *((count, count) for count in counts)))
    index = []
    for size, taps, gap, step in zip(
        padded.shape[2:],
        per_axis(kernel_size, 2),
        per_axis(dilation, 2),
        per_axis(stride, 2),
        strict=True,
    ):
        count = (size - gap * (taps - 1) - 1) // step + 1
        index.append(np.arange(taps)[:, None] * gap + np.arange(count) * step)
    rows, columns = index
    patches = padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return patches.reshape(x.shape[0], x.shape[1] * rows.shape[0] * columns.shape[0], -1)


def fold(
    x: Array,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Array:
    """Adds the windows that `unfold` returns to images, and sums where windows overlap.

    Args:
        x: `(batch, channels * window elements, windows)`.
        output_size: Height and width of the images.
        kernel_size: Size of the windows.
        dilation: Distance between the elements of a window.
        padding: Number of elements that `unfold` added before and after each axis.
        stride: Distance between windows.

    Returns:
        `(batch, channels, height, width)`.
    """
    taps = per_axis(kernel_size, 2)
    channels = x.shape[1] // (taps[0] * taps[1])
    shape = jax.ShapeDtypeStruct((x.shape[0], channels, *per_axis(output_size, 2)), x.dtype)
    transposed = jax.linear_transpose(
        lambda images: unfold(images, kernel_size, dilation, padding, stride), shape
    )
    return transposed(x)[0]
