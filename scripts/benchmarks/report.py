"""What a benchmark writes down: the row of a contestant, its table, the section of the docs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import harness

from hfseq.checkpoints.config import parse_overrides
from hfseq.errors import UsageError


def tell(line: str) -> None:
    """Print progress where it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


def summary(
    row: harness.Row, baseline: harness.Row, tokens: int, flops: float, rate: float
) -> dict:
    """Return the numbers of a row of the table; ``None`` where it did not run.

    ``tokens`` and ``flops`` are those of a step, ``rate`` the FLOP/s of a large matrix product.
    """
    seconds = row.median
    return {
        "name": row.name, "group": row.group, "status": row.status, "seconds": row.seconds,
        "median_seconds": seconds, "spread": row.spread, "start_seconds": row.start_seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "ratio": harness.ratio(row, baseline),
        "mfu": flops / seconds / rate if seconds and rate and flops else None,
        "peak_memory_gb": row.peak_bytes / harness.GB or None, "facts": row.facts,
    }  # fmt: skip


def as_table(rows: list[dict], group: str, unit: str, mfu: bool = False) -> str:
    """Return the Markdown table of ``summary`` rows; ``group`` heads what tells groups apart."""
    columns = ["", group, "tokens/s", f"ms {unit}", "against PyTorch", "MFU", "peak memory"]

    def shown(row: dict) -> list[str]:
        if row["status"] != "ok":
            return [f"{row['name']} ({row['status']})", row["group"], *["-"] * 5]
        spread = f" ± {row['spread']:.0%}" if row["spread"] is not None else ""
        return [
            row["name"], row["group"], f"{row['tokens_per_second']:.0f}",
            f"{row['median_seconds'] * 1000:.0f}{spread}",
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            f"{row['mfu']:.0%}" if row["mfu"] else "-", f"{row['peak_memory_gb']:.2f} GB",
        ]  # fmt: skip

    lines = [columns, *map(shown, rows)]
    if not mfu:
        lines = [[*line[:5], line[6]] for line in lines]
    return harness.table(lines[0], lines[1:])


def baselines(rows: list[harness.Row]) -> dict[str, harness.Row]:
    """Return the first row of each group, which the others are compared with."""
    return {row.group: row for row in reversed(rows)}


def machine_line(result: dict) -> str:
    """Say what the numbers were measured on."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {result['threads']} threads, load {machine['load']:g} at the start "
        f"({', '.join(machine['features']) or 'no AVX2'}); {versions}"
    )


def size_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what ``--layers`` and ``--config_overrides`` change in the configuration."""
    size = {} if options.layers is None else {"layers": options.layers}
    try:
        size |= parse_overrides(options.config_overrides)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    return size


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every benchmark has."""
    parser.add_argument("--layers", type=int, default=None, help="layers of every stack")
    parser.add_argument(
        "--config_overrides", help="changes to the configuration, e.g. hidden_size=256,n_inner=512"
    )
    parser.add_argument("--threads", type=int, default=None, help="cores for each; all by default")
    parser.add_argument("--no_check", action="store_true", help="do not compare results first")
    parser.add_argument(
        "--output", type=Path, default=harness.ROOT / "docs",
        help="gets benchmarks/tables.md and benchmarks/*.json",
    )  # fmt: skip


def command(script: str, arguments: list[str] | None) -> str:
    """Return the command to repeat, without the place where its output went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--output" in given:
        at = given.index("--output")
        del given[at : at + 2]
    return shlex.join(["python", f"scripts/benchmarks/{script}.py", *given])


def head_of(
    name: str, script: str, arguments: list[str] | None, options: argparse.Namespace, threads: int
) -> dict[str, Any]:
    """Return how a result begins: what ran, and on what."""
    return {
        "benchmark": name, "command": command(script, arguments),
        "machine": harness.machine_facts(), "threads": threads,
        "options": {key: value for key, value in vars(options).items() if key != "output"},
    }  # fmt: skip


def publish(result: dict, section: str, output: Path, failed: bool) -> int:
    """Write JSON and the section of the docs, print them and the problems; returns the exit code.

    A contestant that fails is a problem, one whose packages are missing is none.
    """
    name = result["benchmark"]
    result["problems"] += [
        f"{row['name']} ({row['group']}) {row['status']}"
        for row in result["rows"]
        if row["status"].startswith("failed")
    ]
    harness.write_json(output / "benchmarks" / f"{name}.json", result)
    harness.write_section(output / "benchmarks" / "tables.md", name, section)
    print(section)
    for problem in result["problems"]:
        tell(problem)
    return 1 if failed or result["problems"] else 0
