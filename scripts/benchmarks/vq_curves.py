"""What follows from the points of the VQ benchmark: curves, their flatness, where they cross."""

from __future__ import annotations

import math
import statistics
from typing import Any

import harness

# From here on the time per token of VQ has to be constant, to within this share.
FLAT_FROM, FLAT_WITHIN = 4096, 0.15


def merged(passes: list[list[harness.Row]]) -> list[harness.Row]:
    """Join the rows of several passes over the same points; a failure in one is a failure."""
    rows: dict[tuple[str, str], harness.Row] = {}
    for row in (row for found in passes for row in found):
        kept = rows.setdefault((row.group, row.name), row)
        if kept is row:
            continue
        kept.seconds += row.seconds
        kept.values += row.values
        kept.peak_bytes = max(kept.peak_bytes, row.peak_bytes)
        if kept.status == "ok":
            kept.status = row.status
    return list(rows.values())


def point(row: harness.Row, place: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the numbers of one point; ``place`` says which it is."""
    facts, length = row.facts, place["length"]
    fits = facts.get("fits", True)
    seconds = row.median if fits else None
    return {
        "name": row.name, "group": row.group, **place,
        "status": row.status if fits else "does not fit",
        "seconds": row.seconds if fits else [], "median_seconds": seconds,
        "spread": row.spread if fits else None,
        "microseconds_per_token": 1e6 * seconds / (rows * length) if seconds else None,
        "tokens_per_second": rows * length / seconds if seconds else None,
        "compiled_bytes": facts.get("compiled_bytes"),
        "compiled_bytes_per_token": facts.get("compiled_bytes", 0) / (rows * length) or None,
        "temporary_bytes": facts.get("temporary_bytes"),
        "resting_bytes": facts.get("resting_bytes"),
        "peak_bytes": row.peak_bytes or None, "peak_of_steps": facts.get("peak_of_steps"),
    }  # fmt: skip


def curves(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one curve for each head type and attention, over the lengths that ran."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in points:
        found.setdefault((each["head_type"], each["name"]), []).append(each)
    return [curve(head, name, members) for (head, name), members in found.items()]


def curve(head: str, name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a curve: its points in order, how steep it is, and how flat from 4k on."""
    points = sorted(points, key=lambda each: each["length"])
    ran = [each for each in points if each["microseconds_per_token"]]
    lengths = [each["length"] for each in ran]
    times = [each["microseconds_per_token"] for each in ran]
    return {
        "head_type": head, "name": name, "lengths": lengths, "microseconds_per_token": times,
        "does_not_fit": [p["length"] for p in points if p["status"] == "does not fit"],
        "memory_lengths": [p["length"] for p in points if p["compiled_bytes"]],
        "compiled_bytes": [p["compiled_bytes"] for p in points if p["compiled_bytes"]],
        "exponent": steepness(lengths, times), "deviation_from_flat": deviation(lengths, times),
    }  # fmt: skip


def steepness(lengths: list[int], times: list[float]) -> float | None:
    """Return the exponent of time per token over length from 4k on: 0 is linear, 1 quadratic."""
    pairs = [(math.log(n), math.log(t)) for n, t in _long(lengths, times)]
    if len(pairs) < 2:
        return None
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope


def deviation(lengths: list[int], times: list[float]) -> float | None:
    """Return the largest deviation of time per token from its median, over lengths from 4k on."""
    kept = [time for _, time in _long(lengths, times)]
    if len(kept) < 2:
        return None
    middle = statistics.median(kept)
    return max(abs(time / middle - 1) for time in kept)


def _long(lengths: list[int], times: list[float]) -> list[tuple[int, float]]:
    return [(n, t) for n, t in zip(lengths, times, strict=True) if n >= FLAT_FROM]


def crossover(fast: dict[str, Any], slow: dict[str, Any]) -> dict[str, Any]:
    """Say from which length ``fast`` takes less time than ``slow``.

    Between two measured lengths both are straight lines in logarithms. ``length`` is None where
    they do not cross within what was measured, and ``text`` says on which side they are.
    """
    other = dict(zip(slow["lengths"], slow["microseconds_per_token"], strict=True))
    gaps = [
        (n, math.log(other[n] / t))
        for n, t in zip(fast["lengths"], fast["microseconds_per_token"], strict=True)
        if n in other
    ]
    pair = f"{fast['name']} and {slow['name']} ({fast['head_type']})"
    found: dict[str, Any] = {"pair": pair, "length": None}
    if not gaps:
        return found | {"text": f"{pair}: no length was measured for both"}
    if gaps[0][1] >= 0:
        return found | {
            "text": f"{pair}: {fast['name']} is ahead from {gaps[0][0]} tokens, or less"
        }
    for (a, below), (b, above) in zip(gaps, gaps[1:], strict=False):
        if above >= 0:
            share = below / (below - above)
            length = round(math.exp(math.log(a) + share * math.log(b / a)))
            return found | {"length": length, "text": f"{pair} cross at {length} tokens"}
    return found | {"text": f"{pair}: {slow['name']} is ahead up to {gaps[-1][0]} tokens"}


def crossovers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where each VQ curve meets the quadratic one of its head type."""
    full = {each["head_type"]: each for each in found if each["name"] == "full"}
    return [
        crossover(each, full[each["head_type"]])
        for each in found
        if each["name"].startswith("vq") and each["head_type"] in full
    ]


def not_flat(found: list[dict[str, Any]]) -> list[str]:
    """Name the VQ curves whose time per token is not constant from 4k on."""
    return [
        f"{each['name']} ({each['head_type']}): time per token from {FLAT_FROM} tokens on deviates "
        f"by {each['deviation_from_flat']:.0%} from its median (allowed {FLAT_WITHIN:.0%})"
        for each in found
        if each["name"].startswith("vq ") and (each["deviation_from_flat"] or 0) > FLAT_WITHIN
    ]


def ratios(rows: list[harness.Row]) -> dict[str, dict[str, float]]:
    """Return, by group and name, how many times faster than ``full``: medians over rounds."""
    full = {row.group: row for row in rows if row.name == "full"}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        other = full.get(row.group)
        if row.name == "full" or other is None or not other.facts.get("fits", True):
            continue
        value = harness.ratio(row, other) if row.facts.get("fits", True) else None
        if value:
            found.setdefault(row.group, {})[row.name] = value
    return found
