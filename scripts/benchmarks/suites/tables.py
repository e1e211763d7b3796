"""How rows are shown: columns that suites choose from, and the section of the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import harness

#: A title, and what a row shows below it.
Column = tuple[str, Callable[[dict], str]]
ABSENT = "-"


def rate(row: dict) -> str:
    """Units a second, with the unit where it is not tokens."""
    unit = "" if row["unit"] == "tokens" else f" {row['unit']}"
    value = row["rate"]
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def milliseconds(row: dict) -> str:
    """Median milliseconds of a step and half of the interquartile range."""
    spread = f" ± {row['spread']:.0%}" if row["spread"] is not None else ""
    value = row["median_seconds"] * 1000
    return f"{value:.{0 if value >= 10 else 2}f}{spread}"


def ratio(row: dict) -> str:
    """How many times faster than PyTorch."""
    return f"{row['ratio']:.2f}x" if row["ratio"] else ABSENT


def share(row: dict) -> str:
    """The share of the limit that binds, and its name."""
    found = row["limit"]
    return f"{found['share']:.0%} of {found['binding']}" if found else ABSENT


def memory(row: dict) -> str:
    """Peak memory."""
    return f"{row['peak_memory_gb']:.2f} GB" if row["peak_memory_gb"] else ABSENT


def value(name: str, show: Callable[[float], str]) -> Callable[[dict], str]:
    """Return a column of the median of what each step said under ``name``."""

    def shown(row: dict) -> str:
        found = values_of(row, name)
        return show(found) if found is not None else ABSENT

    return shown


def values_of(row: dict, name: str) -> float | None:
    """Return the median of what the steps said under ``name``."""
    import statistics

    found = [values[name] for values in row["values"] if values.get(name) is not None]
    return statistics.median(found) if found else None


CASE: Column = ("case", lambda row: row["case"])
RATE: Column = ("a second", rate)
TOKENS: Column = ("tokens/s", rate)
TIME: Column = ("ms a step", milliseconds)
RATIO: Column = ("against PyTorch", ratio)
LIMIT: Column = ("share of the limit", share)
MEMORY: Column = ("peak memory", memory)
DEFAULT = (CASE, TOKENS, TIME, RATIO, LIMIT, MEMORY)


def table(rows: Sequence[dict], columns: Sequence[Column]) -> str:
    """Return the Markdown table of summaries; a row that did not run says why."""

    def cells(row: dict) -> list[str]:
        if row["status"] != "ok" or row["median_seconds"] is None:
            why = row["status"] if row["status"] != "ok" else "not timed"
            named = f"{row['name']} ({why})".replace("|", "/")
            rest = [row["case"] if title == CASE[0] else ABSENT for title, _ in columns]
            return [named, *rest]
        return [row["name"], *(show(row) for _, show in columns)]

    return harness.table(["", *(title for title, _ in columns)], [cells(row) for row in rows])


def machine_line(result: dict) -> str:
    """Say what the numbers were measured on, and what it can do at most."""
    machine, limits = result["machine"], result["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    can = [
        f"{limits[kind] / 1e9:.0f} {'GB/s' if kind == 'bandwidth' else f'GFLOP/s in {kind}'}"
        for kind in limits
    ]
    devices = sorted({row["facts"]["device"] for row in result["rows"] if "device" in row["facts"]})
    on = f"on {', '.join(devices)}; " if any(d != "cpu" for d in devices) else ""
    return (
        f"{machine['cpu']}, {result['threads']} threads, load {machine['load']:g} at the start "
        f"({', '.join(machine['features']) or 'no AVX2'}); {on}{versions}; measured limits: "
        f"{', '.join(can) or 'none'}."
    )


def section(result: dict, suite: Any, picture: str | None) -> str:
    """Return what benchmarks/tables.md shows of a suite."""
    parts = [table(result["rows"], suite.COLUMNS)]
    if picture:
        parts.append(f"![{suite.TITLE}]({picture})")
    parts += result["remarks"]
    if result["profile"] != "full":
        parts.append(f"Small models (--{result['profile']}): this is not the speed of real ones.")
    if any(row["ratio"] for row in result["rows"]):
        parts.append(
            f"{result['rounds']}: medians, ± half of the interquartile range; a ratio is the "
            "median over rounds, each compared within itself."
        )
    parts += [machine_line(result), f"`{result['command']}`"]
    return "\n\n".join(parts)
