"""Weights of linear and cubic interpolation, with the conventions of PyTorch's `interpolate`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def cubic(distance: Any, a: float = -0.75) -> Any:
    """Computes the weights of cubic interpolation (Keys, 1981).

    Args:
        distance: Distance of each element from the interpolated position, in elements.
        a: Parameter of the interpolation kernel.
    """
    library = np if isinstance(distance, np.ndarray) else jnp
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return library.where(d <= 1, near, library.where(d < 2, far, 0.0))


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1 - np.abs(distance))


def resize_matrix(
    length: int,
    new_length: int,
    method: str,
    align_corners: bool = False,
    factor: float | None = None,
    antialias: bool = False,
) -> np.ndarray:
    """Returns the matrix `(new_length, length)` that interpolates along an axis.

    Args:
        length: The old number of elements.
        new_length: The new number of elements.
        method: "linear" or "cubic".
        align_corners: Whether the centers of the first and last element keep their positions.
        factor: The scale factor that the user passed, or `None`. As in PyTorch, it determines the
            distance between the new elements, even if `new_length` is rounded.
        antialias: Whether to smooth the array before its size is reduced.
    """
    step = 1 / factor if factor else length / new_length
    if align_corners:
        step = (length - 1) / (new_length - 1) if new_length > 1 else 0.0
        centers = np.arange(new_length) * step
    else:
        centers = (np.arange(new_length) + 0.5) * step - 0.5
    matrix = np.zeros((new_length, length))
    if antialias:
        width = max(step, 1.0)
        distance = (np.arange(length)[None] - centers[:, None]) / width
        matrix = _triangle(distance) if method == "linear" else cubic(distance, -0.5)
        return matrix / matrix.sum(1, keepdims=True)
    if method == "linear":
        centers = centers if align_corners else np.maximum(centers, 0)
    low = np.floor(centers).astype(int)
    for offset in (0, 1) if method == "linear" else (-1, 0, 1, 2):
        distance = low + offset - centers
        weight = _triangle(distance) if method == "linear" else cubic(distance)
        place = np.arange(new_length), np.clip(low + offset, 0, length - 1)
        np.add.at(matrix, place, weight)
    return matrix
