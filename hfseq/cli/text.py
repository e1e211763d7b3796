"""What all commands print with: colours, columns, tables, numbers, JSON, curves of characters."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence

_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "faint": "2", "bold": "1"}


def colorize(text: str, colour: str) -> str:
    """Return ``text`` in a colour, where standard output is a terminal that shows colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not sys.stdout.isatty() else f"\033[{_CODES[colour]}m{text}\033[0m"


def terminal_width(largest: int = 100) -> int:
    """Return the columns to write in: those of the terminal, 80 where there is none."""
    return max(40, min(largest, shutil.get_terminal_size().columns))


def format_table(rows: Sequence[Sequence[str]], columns: int | None = None) -> list[str]:
    """Align cells to the right, the first of a row to the left.

    Columns that do not fit into so many characters are left out.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    kept, used = 1, sizes[0]
    while kept < len(sizes) and (columns is None or used + 2 + sizes[kept] <= columns):
        kept, used = kept + 1, used + 2 + sizes[kept]
    return [
        "  ".join(
            cell.rjust(size) if place else cell.ljust(size)
            for place, (cell, size) in enumerate(zip(row[:kept], sizes, strict=False))
        ).rstrip()
        for row in rows
    ]


def format_number(value: float | None) -> str:
    """Write a measured value with four digits; nothing where there is none."""
    return "" if value is None else f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """Write seconds as people do: 42 s, 3:07 min, 2:30 h, 3.1 days; nothing for None."""
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
    """Write bytes in units of 1000."""
    return f"{format_quantity(count)}B"


def format_quantity(value: float) -> str:
    """Write a number with three digits and a unit's prefix."""
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return _three_digits(value, units) or f"{value:.0f} "


def format_seconds(value: float) -> str:
    """Write a time in seconds, milli- or microseconds."""
    return _three_digits(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))) or f"{value * 1e6:.2f} us"


def _three_digits(value: float, units: Sequence[tuple[float, str]]) -> str:
    for unit, name in units:
        if abs(share := value / unit) >= 1:
            places = 0 if abs(share) >= 100 else 1 if abs(share) >= 10 else 2
            return f"{share:.{places}f} {name}"
    return ""


def add_json(parser: argparse._ActionsContainer, text: str = "print JSON") -> None:
    """Add the flag ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def print_json(value: object, *, one_line: bool = False, texts: bool = False) -> None:
    """Print ``value`` as JSON.

    ``one_line`` suits output of a record a line; ``texts`` keeps letters beyond ASCII as they are.
    """
    print(json.dumps(value, indent=None if one_line else 2, ensure_ascii=not texts), flush=True)


#: Bits of the dots of a Braille cell, by row and column; the first of their characters.
_DOTS, _BLANK = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)), 0x2800


def draw_curve(points: Sequence[tuple[float, float]], columns: int, rows: int = 8) -> list[str]:
    """Return lines with the curve through ``points`` (x, y), its y limits and its x limits.

    The points may come in any order; those that are not finite are left out. The curve is made of
    Braille dots where standard output writes UTF-8, else of stars.
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
    """Return which dots are set, from the top: each column's mean, joined to the one before."""
    # Shares of the largest: a sum, or a difference, of numbers near the limit is infinite.
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
    for before, column in zip([columns[0], *columns], columns, strict=False):
        for x in range(before, column + 1):
            share = 1.0 if column == before else (x - before) / (column - before)
            y = heights[before] + share * (heights[column] - heights[before])
            dots[down - 1 - round(y)][x] = True
        if column - before <= 1:  # a steep step leaves a gap
            for y in range(*sorted((heights[before], heights[column]))):
                dots[down - 1 - y][column] = True
    return dots


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
