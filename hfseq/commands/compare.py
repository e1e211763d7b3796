"""``hfseq compare``: runs beside each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from hfseq.commands.report import duration, table
from hfseq.commands.terminal import paint, width
from hfseq.errors import UsageError

EXAMPLES = """hfseq compare runs/base runs/wide
hfseq compare runs/* --x tokens --plot wide.png
hfseq compare runs/base runs/wide --metric eval_accuracy
hfseq compare runs/* --json | jq .different_flags"""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "directories", metavar="DIR", nargs="+", help="output_dirs of runs, or their metrics.jsonl"
    )
    parser.add_argument(
        "--x", choices=("step", "tokens", "time"), default="step",
        help="what the curves are drawn over (step)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME", help="what is drawn, e.g. eval_bleu; default: the losses"
    )
    parser.add_argument(
        "--plot", metavar="FILE", default="comparison.png", help="the picture (comparison.png)"
    )
    parser.add_argument("--no_plot", action="store_true", help="draw no picture")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_compare(arguments: argparse.Namespace) -> int:
    """Print what the runs came to and which flags differ, and draw their curves."""
    if len(arguments.directories) < 2:
        raise UsageError("compare needs two runs at least; `hfseq report DIR` shows one")
    from hfseq.comparison import compare, draw_comparison
    from hfseq.run_log import RunLog

    logs = [RunLog(directory) for directory in arguments.directories]
    found = compare(logs)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(found)), flush=True)
    if not arguments.no_plot:
        path = draw_comparison(logs, arguments.plot, arguments.x, arguments.metric)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    heads = ["run", "status", "steps", "last loss", "best", "at step", "tokens/s", "time"]
    rows = [_row(name, run) for name, run in found["runs"].items()]
    first, *rest = table([heads, *rows], 10_000)
    yield paint(first, "bold")
    yield from rest
    different = found["different_flags"]
    if different:
        names = list(next(iter(different.values())))
        rows = [
            [flag, *(_shown(values[name]) for name in names)] for flag, values in different.items()
        ]
        yield ""
        first, *rest = table([["flags that differ", *names], *rows], max(width(), 10_000))
        yield paint(first, "bold")
        yield from rest
    elif len(found["without_flags"]) < len(found["runs"]) - 1:
        yield "no flag differs"
    if found["without_flags"]:
        yield f"flags are not known of {', '.join(found['without_flags'])}"


def _row(name: str, run: dict[str, Any]) -> list[str]:
    best = run["best"] or {}
    return [
        name,
        run["status"],
        f"{run['step']:,}",
        _number(run["last_loss"]),
        f"{best['metric']} {best['value']:.4g}" if best else "",
        f"{best['step']:,}" if best else "",
        "" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:,.0f}",
        "" if run["seconds"] is None else duration(run["seconds"]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "-"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else f"{text[:18]}…{text[-21:]}"
