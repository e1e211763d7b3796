"""What the machine can do at most, which the other suites measure against."""

from __future__ import annotations

from typing import Any

import harness
import limits

from suites import tables
from suites.base import Case, Options

TITLE = "Limits of the machine"
SUMMARY = (
    "The rate of a large matrix product in each type, and of memory by the triad a = b + s c "
    "(STREAM). The best of each is the limit that the other tables refer to. Takes jax or PyTorch "
    "and nothing else."
)
PICTURE = None


def _rate(row: dict) -> str:
    return f"{row['rate'] / 1e9:.0f} G{row['unit']}/s"


COLUMNS = (tables.CASE, ("rate", _rate), tables.TIME, tables.MEMORY)


def contestants(options: Options) -> list[harness.Contestant]:
    """Return what is run to measure the limits."""
    small: dict[str, Any] = {"size": 256, "triad_bytes": 1 << 22} if options.tiny else {}
    return limits.contestants(options.types(("float32", "bfloat16")), **small)


def cases(options: Options) -> list[Case]:
    """Return a case for each type, and one for memory; the work of a step says what it does."""
    found = []
    members = contestants(options)
    for group in dict.fromkeys(c.group for c in members):
        own = tuple(c for c in members if c.group == group)
        unit = "B" if group == "bandwidth" else "FLOP"
        name = "memory" if group == "bandwidth" else f"product, {group}"
        found.append(Case(name, own, 0.0, unit, rounds=options.choose(20, 20, 10, 2), warmup=2))
    return found
