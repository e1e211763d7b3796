"""``hfseq report``: how a run is going, or went."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hfseq.cli import text as text_curve
from hfseq.cli.text import paint, width
from hfseq.errors import UsageError

if TYPE_CHECKING:
    from hfseq.reports.log import RunLog

EXAMPLES = """hfseq report my-roberta
hfseq report my-roberta --watch 30
hfseq report my-roberta --plot curve.png
hfseq report my-roberta --json | jq .best"""


EVALUATIONS = 6


COLOURS = {"running": "blue", "finished": "green", "stopped": "yellow", "ended": "bold"}


#: Metrics of evaluations that say how long it took, not how well it went.
NOT_QUALITY = ("runtime", "_per_second", "_samples", "_steps")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("directory", metavar="DIR", help="a run's output_dir, or its metrics.jsonl")
    parser.add_argument("--plot", metavar="FILE", help="write the learning curve there, as PNG")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=10.0, metavar="SECONDS",
        help="refresh every so often until the run is finished (10)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_report(arguments: argparse.Namespace) -> int:
    """Print the report, once or until the run is finished."""
    from hfseq.reports.log import RunLog, summarise

    if arguments.watch is not None and not (arguments.watch > 0 and not arguments.json):
        raise UsageError("--watch needs a positive number of seconds, and no --json")
    while True:
        log = RunLog(arguments.directory)
        found = summarise(log)
        text = json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(log, found))
        if arguments.watch is not None and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(text, flush=True)
        if arguments.watch is None or found["status"] == "finished":
            break
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:  # that is how one leaves
            return 0
    if arguments.plot:
        from hfseq.reports.plots import learning_curve

        print(f"wrote {learning_curve(log.file, arguments.plot, title=log.name)}", file=sys.stderr)
    return 0


def _lines(log: RunLog, found: dict[str, Any]) -> Iterator[str]:
    from hfseq.reports.log import LOSS

    yield f"{paint(found['name'], 'bold')}: {paint(found['status'], COLOURS[found['status']])}"
    yield from (f"  {label:14}{value}" for label, value in _rows(found) if value)
    points = log.points(*LOSS)
    if len(points) > 1:
        yield ""
        yield "  training loss by step"
        yield from (f"  {line}" for line in text_curve.draw(points, width() - 2))
    yield from _evaluations(found["evaluations"])
    for warning in found["warnings"]:
        yield f"{paint('warning', 'yellow')}: {warning}"


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    total, step = found["total_steps"], found["step"]
    share = f" of {total:,} ({step / total:.0%})" if total else ""
    epoch = f", epoch {found['epoch']:.2f}" if found["epoch"] is not None else ""
    yield "step", f"{step:,}{share}{epoch}"
    yield "tokens seen", _count(found["tokens_seen"])
    yield "time", _times(found)
    yield "rate", _rate(found)
    if found["last_loss"] is not None:
        yield "training loss", f"{found['first_loss']:.4g} at first, {found['last_loss']:.4g} now"
    if best := found["best"]:
        yield "best", f"{best['metric']} {best['value']:.4g} at step {best['step']:,}"
    if found["resumed_at"]:
        yield "resumed at", ", ".join(f"{step:,}" for step in found["resumed_at"])


def _times(found: dict[str, Any]) -> str:
    parts = [f"{duration(found['seconds'])} of training"] if found["seconds"] is not None else []
    if found["seconds_to_go"] is not None:
        parts.append(f"{duration(found['seconds_to_go'])} to go")
    return ", ".join([*parts, f"last record {duration(found['seconds_since_last_record'])} ago"])


def _rate(found: dict[str, Any]) -> str:
    parts = []
    if found["tokens_per_second"] is not None:
        parts.append(f"{found['tokens_per_second']:,.0f} tokens/s")
    if found["mfu"] is not None:
        parts.append(f"MFU {found['mfu']:.1%}")
    if found["peak_memory_gb"] is not None:
        parts.append(f"peak memory {found['peak_memory_gb']:.2f} GB")
    return ", ".join(parts)


def _evaluations(evaluations: list[dict[str, Any]]) -> Iterator[str]:
    if not evaluations:
        return
    names = [
        name
        for name in dict.fromkeys(name for record in evaluations for name in record)
        if name != "step" and not name.endswith(NOT_QUALITY)
    ]
    heads = ["step", *names]
    rows = [
        [f"{record['step']:,}", *(_shown(record.get(name)) for name in names)]
        for record in evaluations[-EVALUATIONS:]
    ]
    yield ""
    yield from (f"  {line}" for line in table([heads, *rows], width() - 2))


def table(rows: list[list[str]], columns: int) -> list[str]:
    """Align cells to the right (the first to the left); columns that do not fit are left out."""
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    kept, used = 0, 0
    for size in sizes:
        if kept and used + size > columns:
            break
        kept, used = kept + 1, used + size + 2
    lines = []
    for row in rows:
        first, *rest = zip(row[:kept], sizes, strict=False)
        cells = [f"{first[0]:<{first[1]}}", *(f"{cell:>{size}}" for cell, size in rest)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(value: float | None) -> str:
    from hfseq.reports.plots import short

    return "" if value is None else short(value)


def duration(seconds: float) -> str:
    """Write seconds as people do: 42 s, 3:07 min, 2:30 h, 3.1 days."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} days"


COMPARE_EXAMPLES = """hfseq compare runs/base runs/wide
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
    from hfseq.reports.log import RunLog
    from hfseq.reports.plots import compare, draw_comparison

    logs = [RunLog(directory) for directory in arguments.directories]
    found = compare(logs)
    print(
        json.dumps(found, indent=2) if arguments.json else "\n".join(_compared_lines(found)),
        flush=True,
    )
    if not arguments.no_plot:
        path = draw_comparison(logs, arguments.plot, arguments.x, arguments.metric)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _compared_lines(found: dict[str, Any]) -> Iterator[str]:
    heads = ["run", "status", "steps", "last loss", "best", "at step", "tokens/s", "time"]
    rows = [_row(name, run) for name, run in found["runs"].items()]
    first, *rest = table([heads, *rows], 10_000)
    yield paint(first, "bold")
    yield from rest
    different = found["different_flags"]
    if different:
        names = list(next(iter(different.values())))
        rows = [
            [flag, *(_compared_value(values[name]) for name in names)]
            for flag, values in different.items()
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


def _compared_value(value: Any) -> str:
    if value is None or value == []:
        return "-"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else f"{text[:18]}…{text[-21:]}"
