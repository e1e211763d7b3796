"""Runs beside each other: their numbers, the flags that differ, and their curves in one picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq.errors import DataError
from hfseq.plots import INK, curve, plain, save, short, smooth
from hfseq.run_log import LOSS, RunLog, summarise

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

#: Okabe and Ito's colours, which most colour-blind people tell apart, dark enough for white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#333333", "#8f7bd6")
#: What the horizontal axis shows: the metrics that say it, and its label.
AXES = {
    "step": ((), "step"),
    "tokens": (("tokens_seen", "train_tokens_seen"), "tokens seen"),
    "time": (("train_runtime",), "time of training"),
}
#: Flags that say where something lies or what is shown, not what is trained.
NOT_COMPARED = (
    *("output_dir", "run_name", "report_to", "hub_model_id", "push_to_hub", "disable_tqdm"),
    *("overwrite_output_dir", "data_cache_dir", "compilation_cache_dir", "cache_dir", "debug"),
    *("resume_from_checkpoint", "overwrite_cache", "hub_strategy", "hub_private_repo"),
)
SMOOTH_FROM = 60


def named(logs: Sequence[RunLog]) -> dict[str, RunLog]:
    """Return the runs by names that differ: that of the directory, or of more of its path."""
    paths = [log.folder.resolve() for log in logs]
    if len(set(paths)) < len(paths):
        raise DataError(f"{next(p for p in paths if paths.count(p) > 1)} is given twice")
    longest = max(len(path.parts) for path in paths)
    for depth in range(1, longest + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, logs, strict=True))


def compare(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return a summary of each run by name, and the flags that differ; JSON's types."""
    runs = named(logs)
    flags = {
        name: {key: value for key, value in log.flags().items() if value not in (None, [])}
        for name, log in runs.items()
    }
    known = {name: own for name, own in flags.items() if own}
    keys = {key for own in known.values() for key in own if key not in NOT_COMPARED}
    different = {
        key: {name: own.get(key) for name, own in known.items()}
        for key in sorted(keys)
        if len({repr(own.get(key)) for own in known.values()}) > 1
    }
    return {
        "runs": {name: summarise(log) for name, log in runs.items()},
        "different_flags": different,
        "without_flags": [name for name, own in flags.items() if not own],
    }


def draw_comparison(
    logs: Sequence[RunLog],
    output_png: str | os.PathLike[str],
    x: str = "step",
    metric: str | None = None,
) -> Path:
    """Draw the training loss of each run, and its evaluations as points; or ``metric`` alone.

    ``x`` is "step", "tokens" or "time" (seconds of training). DataError if there is nothing to
    draw.
    """
    from matplotlib.figure import Figure

    runs = named(logs)
    figure = Figure(figsize=(8, 4.8), facecolor="white", layout="constrained")
    panel = figure.subplots()
    plain(panel)
    drawn = 0
    for number, (name, log) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn += _draw_run(panel, log, name, colour, x, metric)
    if not drawn:
        what = metric or "train_loss or eval_loss"
        raise DataError(f"none of the runs has a finite {what} by {x} to draw")
    panel.set_ylabel(metric or "loss (nats); points: validation", color=INK)
    panel.set_xlim(left=0)
    panel.set_xlabel(AXES[x][1], color=INK)
    panel.xaxis.set_major_formatter(_format(x))
    panel.margins(y=0.06)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}
    columns = 2 if max(map(len, runs)) > 24 else 3
    panel.legend(**place, ncols=columns, frameon=False, fontsize=9, labelcolor=INK)
    return save(figure, Path(output_png))


def _draw_run(panel: Axes, log: RunLog, name: str, colour: str, x: str, metric: str | None) -> int:
    """Draw what a run has; returns how many curves that were."""
    records = log.records
    where = _positions(records, x)
    steps, losses = curve(records, *((metric,) if metric else LOSS))
    drawn = 0
    if len(steps):
        smoothed = len(steps) >= SMOOTH_FROM
        at = where(steps)
        if smoothed:
            panel.plot(at, losses, color=colour, alpha=0.2, linewidth=0.7)
            losses = smooth(losses, len(steps) // 25 | 1)
        marker = "." if len(steps) < 20 else None
        panel.plot(at, losses, color=colour, linewidth=1.7, marker=marker, label=name)
        drawn += 1
    points = curve(records, "eval_loss") if metric is None else (steps[:0], losses[:0])
    if len(points[0]):
        label = None if drawn else name
        panel.plot(where(points[0]), points[1], "o", color=colour, markersize=5,
                   markeredgecolor="white", label=label)  # fmt: skip
        drawn += 1
    return drawn


def _positions(records: Sequence[Mapping[str, Any]], x: str) -> Any:
    """Return the function from steps to places on the horizontal axis."""
    import numpy as np

    if x == "step":
        return lambda steps: steps
    known, places = curve(records, *AXES[x][0])

    def where(steps: np.ndarray) -> np.ndarray:
        if not len(known):
            raise DataError(f"a run's log has no {AXES[x][0][0]}: compare by --x step")
        return np.interp(steps, [0, *known], [0, *places])

    return where


def _format(x: str) -> Any:
    from matplotlib.ticker import FuncFormatter

    def minutes(seconds: float, _: object) -> str:
        return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"

    return FuncFormatter(minutes if x == "time" else lambda value, _: short(value))


__all__ = ["compare", "draw_comparison", "named"]
