"""A curve drawn with characters: Braille dots where the terminal writes UTF-8, else stars."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

#: Bits of the dots of a Braille cell, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


BLANK = 0x2800


def draw(points: Sequence[tuple[float, float]], columns: int, rows: int = 8) -> list[str]:
    """Return lines with the curve through ``points`` (x, y), its y limits and its x limits."""
    if not points:
        return []
    braille = "utf" in (sys.stdout.encoding or "").lower()
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [_label(high), _label(low)]
    margin = max(map(len, labels)) + 1
    across = max(10, columns - margin - 1)
    cell = (2, 4) if braille else (1, 1)
    grid = _grid(points, across * cell[0], rows * cell[1], low, high)
    body = [_braille(grid, row, across) if braille else _stars(grid, row) for row in range(rows)]
    bar = "│" if braille else "|"
    sides = [labels[0], *[""] * (rows - 2), labels[1]]
    lines = [f"{side:>{margin - 1}} {bar}{text}" for side, text in zip(sides, body, strict=True)]
    first, last = _label(points[0][0]), _label(points[-1][0])
    return [*lines, f"{'':{margin + 1}}{first}{last:>{max(1, across - len(first))}}"]


def _grid(
    points: Sequence[tuple[float, float]], across: int, down: int, low: float, high: float
) -> list[list[bool]]:
    """Return which dots are set, from the top: each column's mean, joined to the one before."""
    start, end = points[0][0], points[-1][0]
    columns: dict[int, list[float]] = {}
    for x, y in points:
        place = 0 if end == start else round((x - start) / (end - start) * (across - 1))
        columns.setdefault(place, []).append(y)
    heights = {
        place: 0 if high == low else round((sum(v) / len(v) - low) / (high - low) * (down - 1))
        for place, v in columns.items()
    }
    grid = [[False] * across for _ in range(down)]
    places = sorted(heights)
    for before, place in zip([places[0], *places], places, strict=False):
        for x in range(before, place + 1):
            share = 1.0 if place == before else (x - before) / (place - before)
            y = heights[before] + share * (heights[place] - heights[before])
            grid[down - 1 - round(y)][x] = True
        if place - before <= 1:  # a steep step leaves a gap
            for y in range(*sorted((heights[before], heights[place]))):
                grid[down - 1 - y][place] = True
    return grid


def _braille(grid: list[list[bool]], row: int, across: int) -> str:
    cells = []
    for column in range(across):
        bits = sum(
            DOTS[y][x] for y in range(4) for x in range(2) if grid[4 * row + y][2 * column + x]
        )
        cells.append(chr(BLANK + bits) if bits else " ")
    return "".join(cells).rstrip()


def _stars(grid: list[list[bool]], row: int) -> str:
    return "".join("*" if dot else " " for dot in grid[row]).rstrip()


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "faint": "2", "bold": "1"}


def has_colours() -> bool:
    """Tell whether standard output shows colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and sys.stdout.isatty()


def paint(text: str, colour: str) -> str:
    """Return ``text`` in a colour, where there are colours."""
    return f"\033[{CODES[colour]}m{text}\033[0m" if has_colours() else text


def width(largest: int = 100) -> int:
    """Return the columns to write in: those of the terminal, 80 where there is none."""
    return max(40, min(largest, shutil.get_terminal_size().columns))
