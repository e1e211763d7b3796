"""Command-line interface of ``hfseq report`` and ``hfseq compare``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hfseq.cli.text import (
    add_json,
    colorize,
    draw_curve,
    format_duration,
    format_number,
    format_table,
    print_json,
    terminal_width,
)
from hfseq.errors import UsageError

if TYPE_CHECKING:
    from hfseq.reports.log import Record, RunLog

EXAMPLES = """hfseq report my-roberta
hfseq report my-roberta --watch 30
hfseq report my-roberta --plot curve.png
hfseq report my-roberta --json | jq .best"""

COMPARE_EXAMPLES = """hfseq compare runs/base runs/wide
hfseq compare runs/* --x tokens --plot wide.png
hfseq compare runs/base runs/wide --metric eval_accuracy
hfseq compare runs/* --json | jq .different_flags"""

#: Maximum number of evaluations in the report, which shows the most recent ones.
EVALUATIONS = 6

COLOURS = {"running": "blue", "finished": "green", "stopped": "yellow", "ended": "bold"}

#: Suffixes of evaluation metrics that measure speed and size, not quality.
NOT_QUALITY = ("runtime", "_per_second", "_samples", "_steps")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq report``."""
    parser.add_argument(
        "directory", metavar="DIR", help="Output directory of a run, or its metrics.jsonl."
    )
    parser.add_argument("--plot", metavar="FILE", help="Write the learning curve to this PNG file.")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=10.0,
        metavar="SECONDS",
        help="Refresh the report at this interval until the run is finished. Without a value, the "
        "interval is 10 seconds.",
    )
    add_json(parser)


def run_report(arguments: argparse.Namespace) -> int:
    """Prints the report once, or repeatedly until the run is finished."""
    from hfseq.reports import log as logs

    if arguments.watch is not None and not (arguments.watch > 0 and not arguments.json):
        raise UsageError(
            "--watch requires a positive number of seconds and cannot be combined with --json"
        )
    while True:
        log = logs.RunLog(arguments.directory)
        summary = logs.summarize(log)
        if arguments.watch is not None and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        if arguments.json:
            print_json(summary)
        else:
            print("\n".join(_report(summary, log)), flush=True)
        if arguments.watch is None or summary["status"] == "finished":
            break
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:  # Ctrl-C ends --watch
            return 0
    if arguments.plot:
        from hfseq.reports.plots import learning_curve

        print(f"wrote {learning_curve(log.file, arguments.plot, title=log.name)}", file=sys.stderr)
    return 0


def _report(summary: Record, log: RunLog) -> Iterator[str]:
    from hfseq.reports.log import LOSS_NAMES
    from hfseq.reports.plots import format_count

    name, status = summary["name"], summary["status"]
    yield f"{colorize(name, 'bold')}: {colorize(status, COLOURS[status])}"
    total, step, tokens_seen = summary["total_steps"], summary["step"], summary["tokens_seen"]
    share = f" of {total:,} ({step / total:.0%})" if total else ""
    epoch = f", epoch {summary['epoch']:.2f}" if summary["epoch"] is not None else ""
    times = {
        "seconds": "{} of training",
        "seconds_to_go": "{} remaining",
        "seconds_since_last_record": "last record {} ago",
    }
    rates = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "peak_memory_gb": "peak memory {:.2f} GB",
    }
    losses = [format_number(summary[name]) for name in ("first_loss", "last_loss")]
    fields = {
        "step": f"{step:,}{share}{epoch}",
        "tokens seen": "" if tokens_seen is None else format_count(tokens_seen),
        "time": ", ".join(
            text.format(format_duration(summary[key]))
            for key, text in times.items()
            if summary[key] is not None
        ),
        "rate": ", ".join(
            text.format(summary[key]) for key, text in rates.items() if summary[key] is not None
        ),
        "training loss": "{} at first, {} now".format(*losses) if all(losses) else "",
        "best": "{} at step {}".format(*_best(summary)) if summary["best"] else "",
        "resumed at": ", ".join(f"{step:,}" for step in summary["resumed_at"]),
    }
    yield from (f"  {label:14}{value}" for label, value in fields.items() if value)
    points = log.points(*LOSS_NAMES)
    if len(points) > 1:
        yield from ("", "  training loss by step")
        yield from (f"  {line}" for line in draw_curve(points, terminal_width() - 2))
    if evaluations := summary["evaluations"]:
        names = [
            name
            for name in dict.fromkeys(name for record in evaluations for name in record)
            if name != "step" and not name.endswith(NOT_QUALITY)
        ]
        rows = [
            [f"{record['step']:,}", *(format_number(record.get(name)) for name in names)]
            for record in evaluations[-EVALUATIONS:]
        ]
        yield ""
        yield from (
            f"  {line}" for line in format_table([["step", *names], *rows], terminal_width() - 2)
        )
    for warning in summary["warnings"]:
        yield f"{colorize('warning', 'yellow')}: {warning}"


def _best(summary: Record) -> tuple[str, str]:
    """Returns the best evaluation and its step as text, or empty strings."""
    best = summary["best"]
    return (
        (f"{best['metric']} {format_number(best['value'])}", f"{best['step']:,}")
        if best
        else ("", "")
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq compare``."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        help="Output directories of runs, or their metrics.jsonl.",
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens", "time"),
        default="step",
        help="X axis of the curves. Default: step.",
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="Metric to plot, e.g. eval_bleu. Default: the losses."
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        default="comparison.png",
        help="Output file of the plot. Default: comparison.png.",
    )
    parser.add_argument("--no_plot", action="store_true", help="Do not write a plot.")
    add_json(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """Prints the results of runs and the flags that differ between them, and plots their curves."""
    if len(arguments.directories) < 2:
        raise UsageError(
            "hfseq compare requires at least two runs; use `hfseq report DIR` for a single run"
        )
    from hfseq.reports.log import RunLog, compare

    logs = [RunLog(directory) for directory in arguments.directories]
    comparison = compare(logs)
    if arguments.json:
        print_json(comparison)
    else:
        print("\n".join(_comparison(comparison)), flush=True)
    if not arguments.no_plot:
        from hfseq.reports.plots import draw_comparison

        path = draw_comparison(logs, arguments.plot, arguments.x, arguments.metric)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _comparison(comparison: Record) -> Iterator[str]:
    def shown(value: object) -> str:
        """Formats the value of a flag. In long values, an ellipsis replaces the middle."""
        if value is None or value == []:
            return "-"
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return text if len(text) <= 40 else f"{text[:18]}…{text[-21:]}"

    runs, unknown = comparison["runs"], comparison["without_flags"]
    rows = [["run", "status", "steps", "last loss", "best", "at step", "tokens/s", "time"]]
    for name, run in runs.items():
        rate = run["tokens_per_second"]
        rows.append(
            [
                *(
                    name,
                    run["status"],
                    f"{run['step']:,}",
                    format_number(run["last_loss"]),
                    *_best(run),
                ),
                *("" if rate is None else f"{rate:,.0f}", format_duration(run["seconds"])),
            ]
        )
    heading, *lines = format_table(rows)
    yield colorize(heading, "bold")
    yield from lines
    if different := comparison["different_flags"]:
        rows = [["flags that differ", *next(iter(different.values()))]]
        rows += [[flag, *map(shown, values.values())] for flag, values in different.items()]
        heading, *lines = format_table(rows)
        yield ""
        yield colorize(heading, "bold")
        yield from lines
    elif len(unknown) < len(runs) - 1:
        yield "all flags are equal"
    if unknown:
        yield f"flags were not recorded for {', '.join(unknown)}"
