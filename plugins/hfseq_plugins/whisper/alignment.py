"""Times of tokens, from the cross-attention of Whisper's alignment heads."""

from __future__ import annotations

import numpy as np


def token_times(weights: np.ndarray, filter_width: int, seconds_per_position: float) -> np.ndarray:
    """Returns the time of each generated token of a window, as in PyTorch.

    Dynamic time warping assigns positions of the encoder to the tokens, in order. The time of a
    token is that of its first position. The last token, which is usually EOS, has no attention
    weights, so it gets the time of the token before it.

    Args:
        weights: Attention weights of all generated tokens except the last, `(heads, tokens - 1,
            positions)`.
        filter_width: Width of the median filter over positions, an odd number.
        seconds_per_position: Duration of a position.

    Returns:
        Seconds from the start of the window, `(tokens,)`.
    """
    if weights.shape[1] == 0:
        return np.zeros(1)
    weights = weights.astype(np.float32)
    deviation = weights.std(axis=1, keepdims=True)
    # The deviation is 0 if there is only one token.
    normalized = (weights - weights.mean(axis=1, keepdims=True)) / np.where(deviation, deviation, 1)
    similarity = median_filter(normalized, filter_width).mean(axis=0)
    times = first_columns(-similarity.astype(np.float64)) * seconds_per_position
    return np.append(times, times[-1])


def median_filter(values: np.ndarray, width: int) -> np.ndarray:
    """Filters the last axis, which is reflected at its ends. Shorter axes are not filtered."""
    padding = width // 2
    if values.shape[-1] <= padding:
        return values
    edges = [(0, 0)] * (values.ndim - 1) + [(padding, padding)]
    padded = np.pad(values, edges, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.partition(windows, padding, axis=-1)[..., padding]


def first_columns(costs: np.ndarray) -> np.ndarray:
    """Aligns rows with columns by dynamic time warping.

    The cheapest path from the first to the last entry visits each row and each column. A step goes
    to the next row, to the next column, or to both. Of steps with the same cost, the path takes
    that to the next column.

    Args:
        costs: The cost of each entry, `(rows, columns)`.

    Returns:
        The first column of the path in each row, `(rows,)`.
    """
    rows, columns = costs.shape
    totals = np.full((rows + 1, columns + 1), np.inf, np.float32)
    totals[0, 0] = 0
    row_steps = np.ones((rows + 1, columns + 1), bool)
    column_steps = np.ones((rows + 1, columns + 1), bool)
    # The entries of an antidiagonal depend only on the two antidiagonals before.
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = totals[i - 1, j - 1], totals[i - 1, j], totals[i, j - 1]
        takes_both = (both < row) & (both < column)
        takes_row = (row < both) & (row < column)
        best = np.where(takes_both, both, np.where(takes_row, row, column))
        totals[i, j] = costs[i - 1, j - 1] + best
        row_steps[i, j] = takes_both | takes_row
        column_steps[i, j] = ~takes_row
    first = np.zeros(rows, int)
    i, j = rows, columns
    while i and j:
        first[i - 1] = j - 1
        i, j = i - row_steps[i, j], j - column_steps[i, j]
    return first
