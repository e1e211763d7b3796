"""The learning curve of a run, drawn from its ``metrics.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq.errors import DataError
from hfseq.reports.log import LOSS, RunLog, summarise

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN, EVAL, INK, FAINT = "#3b76af", "#d95f30", "#333333", "#dddddd"


DASHES = ((5, 3), (1.5, 2), (7, 2, 1.5, 2))


TRAIN_LOSS, EVAL_LOSS = ("train_loss", "loss"), "eval_loss"


#: Metrics of validation data by name, of which the first that a log has twice gets a panel.
METRICS = {
    "eval_bleu": "BLEU",
    "eval_matthews_correlation": "Matthews correlation",
    "eval_f1": "F1",
    "eval_f1_macro": "F1 (macro)",
    "eval_pearson": "Pearson correlation",
    "eval_bits_per_byte": "bits per byte",
    "eval_accuracy": "accuracy",
}


LEARNING_RATE = ("train_learning_rate", "learning_rate")


TOKENS_SEEN = ("tokens_seen", "train_tokens_seen")


SMOOTH_FROM = 30


Curve = tuple["np.ndarray", "np.ndarray"]


def learning_curve(
    metrics_jsonl: str | os.PathLike[str],
    output_png: str | os.PathLike[str],
    title: str | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Draw training and validation loss and, below, a metric and the learning rate over the steps.

    ``baselines`` are horizontal lines, for instance ``{"unigram entropy": 6.9}``. Steps without a
    finite value are left out; DataError if no loss is left to draw.
    """
    from hfseq.reports.log import read_metrics

    records = read_metrics(metrics_jsonl)
    if not any(len(curve(records, name)[0]) for name in (*TRAIN_LOSS, EVAL_LOSS)):
        raise DataError(f"{metrics_jsonl} holds no finite train_loss or eval_loss to draw")
    return save(draw(records, title, baselines or {}), Path(output_png))


def draw(
    records: Sequence[Mapping[str, Any]], title: str | None, baselines: Mapping[str, float]
) -> Figure:
    """Return the figure; not pyplot, so that it needs no display and leaves no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    rate = curve(records, *LEARNING_RATE)
    curves = {name: curve(records, name) for name in METRICS}
    metric = next((name for name, found in curves.items() if len(found[0]) > 1), None)
    heights = [4] + [1.5] * (metric is not None) + [1] * bool(len(rate[0]))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = panels[:, 0]
    for panel in panels:
        plain(panel)
    _losses(panels[0], curve(records, *TRAIN_LOSS), curve(records, EVAL_LOSS), baselines)
    if metric:
        _metric(panels[1], curves[metric], METRICS[metric])
    if len(rate[0]):
        _rate(panels[-1], rate)
    _steps(panels[-1], records)
    _heading(panels[0], title)
    return figure


def curve(records: Sequence[Mapping[str, Any]], *names: str) -> Curve:
    """Return steps and values of the first of ``names`` that occurs, finite values only."""
    import numpy as np

    for name in names:
        points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            kept = np.isfinite(values)
            return steps[kept], values[kept]
    return np.empty(0), np.empty(0)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred running mean over ``window`` values, over fewer at the ends."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    # As many values on either side: a lopsided window would bend the ends of a falling curve.
    half = np.minimum(window // 2, np.minimum(index, len(values) - 1 - index))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def _losses(panel: Axes, train: Curve, validation: Curve, baselines: Mapping[str, float]) -> None:
    steps, losses = train
    smoothed = len(steps) >= SMOOTH_FROM
    if smoothed:
        panel.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
        losses = smooth(losses, len(steps) // 25 | 1)
    if len(steps):
        marker = None if smoothed else "."
        label = f"training {losses[-1]:.2f}"
        panel.plot(steps, losses, color=TRAIN, linewidth=1.8, marker=marker, label=label)
    if len(validation[0]):
        label = f"validation {validation[1][-1]:.2f}"
        style: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 4.5}
        panel.plot(*validation, color=EVAL, markeredgecolor="white", label=label, **style)
    for number, (name, value) in enumerate(baselines.items()):
        dashes = DASHES[number % len(DASHES)]
        label = f"{name} {value:.2f}"
        panel.axhline(value, color="#777777", linewidth=1.1, dashes=dashes, label=label)
    panel.set_ylabel("loss (nats)", color=INK)
    panel.margins(y=0.06)


def _metric(panel: Axes, found: Curve, name: str) -> None:
    steps, values = found
    style: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 4.5}
    panel.plot(steps, values, color=EVAL, markeredgecolor="white", **style)
    last = f"{values[-1]:.1f}" if name == "BLEU" else f"{values[-1]:.3f}"
    panel.annotate(last, (steps[-1], values[-1]), xytext=(0, -12), color=INK,
                   textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    panel.set_ylabel(name, color=INK)
    top, bottom = float(values.max()), min(0.0, float(values.min()))
    panel.set_ylim(1.15 * bottom, 1.15 * top if top > 0 else 1.0)


def _rate(panel: Axes, rate: Curve) -> None:
    panel.plot(*rate, color=INK, linewidth=1.1, marker="." if len(rate[0]) == 1 else None)
    panel.fill_between(*rate, color=INK, alpha=0.08, linewidth=0)
    panel.set_ylabel("learning rate", color=INK)
    panel.set_ylim(bottom=0)
    panel.locator_params(axis="y", nbins=3)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    panel.yaxis.get_offset_text().set(color=INK, fontsize=8)


def _steps(panel: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """Label the steps and, beneath them, the tokens seen by then."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps, tokens = curve(records, *TOKENS_SEEN)

    def label(step: float, _: object) -> str:
        if not len(tokens):
            return short(step)
        return f"{short(step)}\n{short(np.interp(step, [0, *steps], [0, *tokens]))}"

    last = max(1, *(record["step"] for record in records), 0)
    panel.set_xlim(0, last * 1.015)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(label))
    panel.set_xlabel("step / tokens seen" if len(tokens) else "step", color=INK)


def short(number: float) -> str:
    """Write a count as people read it: 950, 12.5k, 3M, 1.2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _heading(panel: Axes, title: str | None) -> None:
    columns = min(4, len(panel.get_legend_handles_labels()[0]))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}
    panel.legend(**place, ncols=columns, frameon=False, fontsize=9, labelcolor=INK)
    if title:
        panel.figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, weight="bold")


def plain(panel: Axes) -> None:
    """Take away what distracts from the curves."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(colors=INK, labelsize=9, length=3, color="#999999")


def save(figure: Any, path: Path) -> Path:
    """Write the figure as PNG, whole or not at all; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


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


COMPARISON_SMOOTH_FROM = 60


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
        smoothed = len(steps) >= COMPARISON_SMOOTH_FROM
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
