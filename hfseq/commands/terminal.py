"""What commands know of the terminal: its width, whether it shows colours, and blocks to draw with.

Colours are shown on a terminal only, and not where NO_COLOR is set (https://no-color.org).
"""

from __future__ import annotations

import os
import shutil
import sys

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
