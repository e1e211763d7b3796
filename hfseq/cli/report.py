"""``hfseq report`` and ``hfseq compare``: how a run goes, or went, and several side by side."""

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

#: How many evaluations are shown, the last ones.
EVALUATIONS = 6

COLOURS = {"running": "blue", "finished": "green", "stopped": "yellow", "ended": "bold"}

#: Metrics of evaluations that say how long it took, not how well it went.
NOT_QUALITY = ("runtime", "_per_second", "_samples", "_steps")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq report``."""
    parser.add_argument("directory", metavar="DIR", help="a run's output_dir, or its metrics.jsonl")
    parser.add_argument("--plot", metavar="FILE", help="write the learning curve there, as PNG")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=10.0,
        metavar="SECONDS",
        help="refresh every so often until the run is finished (10)",
    )
    add_json(parser)


def run_report(arguments: argparse.Namespace) -> int:
    """Print the report, once or until the run is finished."""
    from hfseq.reports import log as logs

    if arguments.watch is not None and not (arguments.watch > 0 and not arguments.json):
        raise UsageError("--watch needs a positive number of seconds, and no --json")
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
        except KeyboardInterrupt:  # that is how one leaves
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
    total, step, seen = summary["total_steps"], summary["step"], summary["tokens_seen"]
    share = f" of {total:,} ({step / total:.0%})" if total else ""
    epoch = f", epoch {summary['epoch']:.2f}" if summary["epoch"] is not None else ""
    times = {
        "seconds": "{} of training",
        "seconds_to_go": "{} to go",
        "seconds_since_last_record": "last record {} ago",
    }
    rates = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "peak_memory_gb": "peak memory {:.2f} GB",
    }
    losses = [format_number(summary[name]) for name in ("first_loss", "last_loss")]
    facts = {
        "step": f"{step:,}{share}{epoch}",
        "tokens seen": "" if seen is None else format_count(seen),
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
    yield from (f"  {label:14}{value}" for label, value in facts.items() if value)
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
    """Return the best evaluation and its step, empty where there is none."""
    best = summary["best"]
    return (
        (f"{best['metric']} {format_number(best['value'])}", f"{best['step']:,}")
        if best
        else ("", "")
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq compare``."""
    parser.add_argument(
        "directories", metavar="DIR", nargs="+", help="output_dirs of runs, or their metrics.jsonl"
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens", "time"),
        default="step",
        help="what the curves are drawn over (step)",
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="what is drawn, e.g. eval_bleu; default: the losses"
    )
    parser.add_argument(
        "--plot", metavar="FILE", default="comparison.png", help="the picture (comparison.png)"
    )
    parser.add_argument("--no_plot", action="store_true", help="draw no picture")
    add_json(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """Print what the runs came to and which flags differ, and draw their curves."""
    if len(arguments.directories) < 2:
        raise UsageError("compare needs two runs at least; `hfseq report DIR` shows one")
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
        """Write the value of a flag, the middle of a long one left out."""
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
        yield "no flag differs"
    if unknown:
        yield f"flags are not known of {', '.join(unknown)}"
