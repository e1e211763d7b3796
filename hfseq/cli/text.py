"""Text output of the commands: colors, tables, numbers, JSON and character plots."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence

_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "faint": "2", "bold": "1"}


def colorize(text: str, color: str) -> str:
    """Returns ``text`` in a color if standard output is a terminal that supports colors."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not sys.stdout.isatty() else f"\033[{_CODES[color]}m{text}\033[0m"


def terminal_width(largest: int = 100) -> int:
    """Returns the width of the terminal, at most ``largest``, or 80 without a terminal."""
    return max(40, min(largest, shutil.get_terminal_size().columns))


def format_table(rows: Sequence[Sequence[str]], columns: int | None = None) -> list[str]:
    """Formats a table. The first column is aligned left, the others right.

    Args:
        rows: Rows of cells.
        columns: Width in characters. Table columns that do not fit are omitted.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_columns, used_width = 1, sizes[0]
    while num_columns < len(sizes) and (
        columns is None or used_width + 2 + sizes[num_columns] <= columns
    ):
        num_columns, used_width = num_columns + 1, used_width + 2 + sizes[num_columns]
    return [
        "  ".join(
            cell.rjust(size) if index else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(row[:num_columns], sizes, strict=False))
        ).rstrip()
        for row in rows
    ]


def format_number(value: float | None) -> str:
    """Formats a measured value with four digits, or `None` as an empty string."""
    return "" if value is None else f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """Formats a duration such as 42 s, 3:07 min, 2:30 h or 3.1 days, or `None` as ``""``."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} days"


def format_bytes(count: float) -> str:
    """Formats a number of bytes with decimal prefixes."""
    return f"{format_quantity(count)}B"


def format_quantity(value: float) -> str:
    """Formats a number with three digits and a decimal prefix."""
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return _three_digits(value, units) or f"{value:.0f} "


def format_seconds(value: float) -> str:
    """Formats a time in seconds, milliseconds or microseconds."""
    return _three_digits(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))) or f"{value * 1e6:.2f} us"


def _three_digits(value: float, units: Sequence[tuple[float, str]]) -> str:
    for unit, name in units:
        if abs(scaled := value / unit) >= 1:
            decimals = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:.{decimals}f} {name}"
    return ""


def add_hidden_alias(
    parser: argparse._ActionsContainer, name: str, action: argparse.Action
) -> None:
    """Accepts ``name`` as an earlier spelling of ``action``, without showing it in help."""
    parser._option_string_actions[name] = action  # add_argument would list it in the help


def add_json(parser: argparse._ActionsContainer, text: str = "Print JSON.") -> None:
    """Adds the flag ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def print_json(value: object, *, one_line: bool = False, texts: bool = False) -> None:
    """Prints ``value`` as JSON.

    Args:
        value: The value.
        one_line: Whether to print it on one line, for JSON lines output.
        texts: Whether to print non-ASCII characters without escapes.
    """
    print(json.dumps(value, indent=None if one_line else 2, ensure_ascii=not texts), flush=True)


#: A Braille character has 4 x 2 dots. `_DOTS` contains the bit of each dot, by row and column, and
#: `_BLANK` is the code point of the character without dots.
_DOTS, _BLANK = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)), 0x2800


def draw_curve(points: Sequence[tuple[float, float]], columns: int, rows: int = 8) -> list[str]:
    """Draws a curve with characters: Braille dots on UTF-8 terminals, and stars otherwise.

    Args:
        points: Points (x, y) in any order. Points that are not finite are ignored.
        columns: Width in characters.
        rows: Height in lines.

    Returns:
        The lines of the plot, with the limits of both axes.
    """
    points = sorted(point for point in points if all(map(math.isfinite, point)))
    if not points:
        return []
    braille = "utf" in (sys.stdout.encoding or "").lower()
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [_label(high), _label(low)]
    margin = max(map(len, labels)) + 1
    across = max(10, columns - margin - 1)
    if braille:
        dots = _dots(points, 2 * across, 4 * rows)
        body = []
        for top in range(0, 4 * rows, 4):
            bits = [
                sum(_DOTS[y][x] for y in range(4) for x in range(2) if dots[top + y][left + x])
                for left in range(0, 2 * across, 2)
            ]
            body.append("".join(chr(_BLANK + cell) if cell else " " for cell in bits).rstrip())
    else:
        dots = _dots(points, across, rows)
        body = ["".join("*" if dot else " " for dot in row).rstrip() for row in dots]
    bar = "│" if braille else "|"
    sides = [labels[0], *[""] * (rows - 2), labels[1]]
    lines = [f"{side:>{margin - 1}} {bar}{text}" for side, text in zip(sides, body, strict=True)]
    first, last = _label(points[0][0]), _label(points[-1][0])
    return [*lines, f"{'':{margin + 1}}{first}{last:>{max(1, across - len(first))}}"]


def _dots(points: Sequence[tuple[float, float]], across: int, down: int) -> list[list[bool]]:
    """Returns the rows of dots of a curve, from top to bottom, as booleans.

    Each column shows the mean of its values. A line connects it to the previous column.
    """
    # Normalize first: sums and differences of values near the float limit are infinite.
    xs, ys = ([v / (max(map(abs, axis)) or 1) for v in axis] for axis in zip(*points, strict=True))
    low, width, height = min(ys), xs[-1] - xs[0], max(ys) - min(ys)
    values: dict[int, list[float]] = {}
    for x, y in zip(xs, ys, strict=True):
        column = round((x - xs[0]) / width * (across - 1)) if width else 0
        values.setdefault(column, []).append(y)
    heights = {
        column: round((sum(v) / len(v) - low) / height * (down - 1)) if height else 0
        for column, v in values.items()
    }
    dots = [[False] * across for _ in range(down)]
    columns = sorted(heights)
    for previous, column in zip([columns[0], *columns], columns, strict=False):
        for x in range(previous, column + 1):
            share = 1.0 if column == previous else (x - previous) / (column - previous)
            y = heights[previous] + share * (heights[column] - heights[previous])
            dots[down - 1 - round(y)][x] = True
        if column - previous <= 1:  # fill the gap that a steep step leaves
            for y in range(*sorted((heights[previous], heights[column]))):
                dots[down - 1 - y][column] = True
    return dots


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
