"""Resizing and sampling of images with the semantics of PyTorch's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn.interpolation import cubic, resize_matrix

Array = jax.Array


def resize_nearest(
    x: Array, sizes: Sequence[int], factors: Sequence[float | None], is_exact: bool = False
) -> Array:
    """Resizes an array `(batch, channels, *sizes)` by repeating or omitting elements.

    Args:
        x: The array.
        sizes: The new sizes.
        factors: The scale factor of each axis. `None` means the ratio of the new and old size.
        is_exact: Whether to select the element at the center of each new element ("nearest-exact"
            in PyTorch), and not the element at its start ("nearest").
    """
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        length = x.shape[axis]
        step = np.float32(1 / factor if factor else length / new)
        places = np.arange(new, dtype=np.float32) + np.float32(0.5 if is_exact else 0)
        index = np.minimum(np.floor(places * step).astype(int), length - 1)
        x = jnp.take(x, index, axis)
    return x


def resize(
    x: Array,
    sizes: Sequence[int],
    factors: Sequence[float | None],
    method: str,
    align_corners: bool = False,
    antialias: bool = False,
) -> Array:
    """Resizes an array `(batch, channels, *sizes)` by linear or cubic interpolation in float32.

    Args:
        x: The array.
        sizes: The new sizes.
        factors: The scale factor of each axis. `None` means the ratio of the new and old size.
        method: "linear" or "cubic".
        align_corners: Whether the centers of the first and last element of each axis keep their
            positions. Otherwise, the outer edges of these elements do.
        antialias: Whether to smooth the array before its sizes are reduced.
    """
    y = x.astype(jnp.float32)
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        matrix = resize_matrix(x.shape[axis], new, method, align_corners, factor, antialias)
        product = jnp.tensordot(y, jnp.asarray(matrix, jnp.float32), ((axis,), (1,)))
        y = jnp.moveaxis(product, -1, axis)
    return y.astype(x.dtype)


def interpolate(
    x: Array,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Array:
    """Resizes an array `(batch, channels, *sizes)`.

    Args:
        x: The array. Linear and cubic interpolation are computed in float32.
        size: The new size of each axis, or one size for all.
        scale_factor: The ratio of the new and old size of each axis, or one ratio for all. It is
            used if `size` is `None`.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic" or "area".
        align_corners: Whether the centers of the first and last element of each axis keep their
            positions. Otherwise, the outer edges of these elements do.
        recompute_scale_factor: Whether to replace `scale_factor` with the ratio of the rounded new
            size and the old size.
        antialias: Whether to smooth the array before its sizes are reduced.
    """
    from hfseq.nn.functional.sliding import adaptive_avg_pool

    n = x.ndim - 2
    factors: list[float | None] = [None] * n
    if size is not None:
        sizes = [size] * n if isinstance(size, int) else list(size)
    else:
        assert scale_factor is not None
        scales = [scale_factor] * n if isinstance(scale_factor, int | float) else list(scale_factor)
        sizes = [math.floor(old * scale) for old, scale in zip(x.shape[2:], scales, strict=True)]
        factors = [None] * n if recompute_scale_factor else [float(scale) for scale in scales]
    if mode == "area":
        return adaptive_avg_pool(x, sizes)
    if mode.startswith("nearest"):
        return resize_nearest(x, sizes, factors, mode == "nearest-exact")
    method = "cubic" if mode == "bicubic" else "linear"
    return resize(x, sizes, factors, method, bool(align_corners), antialias)


def grid_sample(
    x: Array,
    grid: Array,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Array:
    """Samples images at the points of a grid.

    Args:
        x: `(batch, channels, height, width)`.
        grid: The column and row of each point, `(batch, new height, new width, 2)`. -1 is the left
            or upper edge, and 1 is the right or lower edge.
        mode: "bilinear", "nearest" or "bicubic".
        padding_mode: The values outside of the image: "zeros", "border" (the nearest value) or
            "reflection".
        align_corners: Whether -1 and 1 refer to the centers of the outer pixels. Otherwise, they
            refer to the outer edges of these pixels.

    Returns:
        `(batch, channels, new height, new width)`.
    """
    height, width = x.shape[2:]

    def unnormalize(coordinate: Array, size: int) -> Array:
        if align_corners:
            return (coordinate + 1) / 2 * (size - 1)
        return ((coordinate + 1) * size - 1) / 2

    def into_image(place: Array, size: int) -> Array:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        if padding_mode == "border":
            place = jnp.clip(place, 0, size - 1)
        elif padding_mode == "reflection":
            span = high - low
            place = jnp.mod(jnp.abs(place - low), 2 * span)
            place = jnp.where(place > span, 2 * span - place, place) + low
            place = jnp.clip(place, 0, size - 1)
        return place

    def at(row: Array, column: Array) -> Array:
        is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        row = jnp.clip(row, 0, height - 1).astype(jnp.int32)
        column = jnp.clip(column, 0, width - 1).astype(jnp.int32)
        values = jax.vmap(lambda image, i, j: image[:, i, j])(x, row, column)
        return values * is_inside[:, None]

    px, py = unnormalize(grid[..., 0], width), unnormalize(grid[..., 1], height)
    if mode == "bicubic":
        left, top = jnp.floor(px), jnp.floor(py)
        columns = [(into_image(left + i, width), cubic(px - left - i)) for i in range(-1, 3)]
        rows = [(into_image(top + i, height), cubic(py - top - i)) for i in range(-1, 3)]
        return sum(
            at(row, column) * (wy * wx)[:, None] for row, wy in rows for column, wx in columns
        )
    px, py = into_image(px, width), into_image(py, height)
    if mode == "nearest":
        return at(jnp.round(py), jnp.round(px))
    left, top = jnp.floor(px), jnp.floor(py)
    wx, wy = (px - left)[:, None], (py - top)[:, None]
    upper = at(top, left) * (1 - wx) + at(top, left + 1) * wx
    lower = at(top + 1, left) * (1 - wx) + at(top + 1, left + 1) * wx
    return upper * (1 - wy) + lower * wy


def pixel_shuffle(x: Array, factor: int) -> Array:
    """Rearranges groups of `factor**2` channels into square blocks of pixels.

    Args:
        x: `(..., channels, height, width)`.
        factor: The side length of the blocks.

    Returns:
        `(..., channels / factor**2, height * factor, width * factor)`.
    """
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    x = x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*lead, channels // factor**2, height * factor, width * factor)


def pixel_unshuffle(x: Array, factor: int) -> Array:
    """Rearranges square blocks of pixels into channels. This is the inverse of `pixel_shuffle`."""
    *lead, channels, height, width = x.shape
    n = len(lead)
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    x = x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*lead, channels * factor**2, height // factor, width // factor)
