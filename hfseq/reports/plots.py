"""Plots from the `metrics.jsonl` of runs: the learning curve of a run, or several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq.errors import DataError, atomic_replace
from hfseq.reports.log import LOSS_NAMES, RunLog, read_metrics, unique_names

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from hfseq.reports.log import Record

TRAIN_COLOR, EVAL_COLOR, TEXT_COLOR, GRID_COLOR = "#3b76af", "#d95f30", "#333333", "#dddddd"
DASHES = ((5, 3), (1.5, 2), (7, 2, 1.5, 2))

#: Colors that color-blind readers can distinguish (Okabe and Ito), made darker for a white
#: background.
RUN_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#8a6d00",
    "#333333",
    "#8f7bd6",
)

#: Validation metrics and their labels. The first one that has several values in the log is drawn.
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

#: Choices of the horizontal axis. Each value is a pair: the names of the metrics that may contain
#: the positions on this axis, and the label of the axis.
AXES = {
    "step": ((), "step"),
    "tokens": (TOKENS_SEEN, "tokens seen"),
    "time": (("train_runtime",), "training time"),
}

#: If a loss has at least this many values, its running mean is drawn, and the values themselves are
#: drawn faintly in the background.
SMOOTH_FROM = 30

#: Larger values are omitted, like infinite ones, because they overflow in matplotlib's ticks.
DRAWABLE = 1e100

Curve = tuple["np.ndarray", "np.ndarray"]


def learning_curve(
    metrics_jsonl: str | PathLike[str],
    output_png: str | PathLike[str],
    title: str | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Draws the learning curve of a run.

    The upper panel shows the training and validation loss over the steps. Panels below it show a
    validation metric and the learning rate.

    Values that are not finite are omitted.

    Args:
        metrics_jsonl: The log of the run.
        output_png: The file to write.
        title: The title.
        baselines: Values of horizontal lines by label, e.g. `{"unigram entropy": 6.9}`.

    Returns:
        The path of the file.

    Raises:
        DataError: The log contains no finite loss.
    """
    records = read_metrics(metrics_jsonl)
    if not any(len(read_curve(records, name)[0]) for name in (*LOSS_NAMES, "eval_loss")):
        raise DataError(f"{metrics_jsonl} contains no finite train_loss or eval_loss to draw")
    return save_figure(draw_learning_curve(records, title, baselines or {}), Path(output_png))


def draw_learning_curve(
    records: Sequence[Record], title: str | None, baselines: Mapping[str, float]
) -> Figure:
    """Returns the figure of the learning curve.

    The function does not use pyplot, so it needs no display and does not change global state.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rate = read_curve(records, *LEARNING_RATE)
    curves = {name: read_curve(records, name) for name in METRICS}
    metric = next((name for name, points in curves.items() if len(points[0]) > 1), None)
    heights = [4] + [1.5] * (metric is not None) + [1] * bool(len(rate[0]))
    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = panels[:, 0]
    for panel in panels:
        style_axes(panel)
    dots: dict[str, Any] = {
        "color": EVAL_COLOR,
        "linewidth": 1.2,
        "marker": "o",
        "markersize": 4.5,
        "markeredgecolor": "white",
    }

    panel = panels[0]
    steps, losses = read_curve(records, *LOSS_NAMES)
    if len(steps):
        line = _draw_loss(panel, steps, losses, TRAIN_COLOR)
        line.set_label(f"training {np.asarray(line.get_ydata())[-1]:.2f}")
    steps, losses = read_curve(records, "eval_loss")
    if len(steps):
        panel.plot(steps, losses, label=f"validation {losses[-1]:.2f}", **dots)
    for number, (name, value) in enumerate(baselines.items()):
        dashes = DASHES[number % len(DASHES)]
        label = f"{name} {value:.2f}"
        panel.axhline(value, color="#777777", linewidth=1.1, dashes=dashes, label=label)
    panel.set_ylabel("loss (nats)", color=TEXT_COLOR)
    panel.margins(y=0.06)
    _legend(panel, min(4, len(panel.get_legend_handles_labels()[0])))

    if metric:
        panel = panels[1]
        steps, values = curves[metric]
        panel.plot(steps, values, **dots)
        last = f"{values[-1]:.1f}" if metric == "eval_bleu" else f"{values[-1]:.3f}"
        panel.annotate(
            last,
            (steps[-1], values[-1]),
            xytext=(0, -12),
            color=TEXT_COLOR,
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        panel.set_ylabel(METRICS[metric], color=TEXT_COLOR)
        top, bottom = float(values.max()), min(0.0, float(values.min()))
        panel.set_ylim(1.15 * bottom, 1.15 * top if top > 0 else 1.0)

    panel = panels[-1]
    if len(rate[0]):
        panel.plot(
            *rate, color=TEXT_COLOR, linewidth=1.1, marker="." if len(rate[0]) == 1 else None
        )
        panel.fill_between(*rate, color=TEXT_COLOR, alpha=0.08, linewidth=0)
        panel.set_ylabel("learning rate", color=TEXT_COLOR)
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="y", nbins=3)
        panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
        panel.yaxis.get_offset_text().set(color=TEXT_COLOR, fontsize=8)
    steps, tokens = read_curve(records, *TOKENS_SEEN)

    def tick(step: float, _: object) -> str:
        if not len(tokens):
            return format_count(step)
        return f"{format_count(step)}\n{format_count(np.interp(step, [0, *steps], [0, *tokens]))}"

    panel.set_xlim(0, max(1, *(record["step"] for record in records), 0) * 1.015)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(tick))
    panel.set_xlabel("step / tokens seen" if len(tokens) else "step", color=TEXT_COLOR)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=TEXT_COLOR, weight="bold")
    return figure


def draw_comparison(
    logs: Sequence[RunLog],
    output_png: str | PathLike[str],
    x: str = "step",
    metric: str | None = None,
) -> Path:
    """Draws the losses of several runs, or one metric.

    Training losses are lines and validation losses are points.

    Args:
        logs: The logs of the runs.
        output_png: The file to write.
        x: The horizontal axis: "step", "tokens" or "time" (training time).
        metric: The metric to draw instead of the losses.

    Returns:
        The path of the file.

    Raises:
        DataError: There is nothing to draw.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    runs = unique_names(logs)
    figure = Figure(figsize=(8, 4.8), facecolor="white", layout="constrained")
    panel = figure.subplots()
    style_axes(panel)
    for number, (name, log) in enumerate(runs.items()):
        color = RUN_COLORS[number % len(RUN_COLORS)]
        label: str | None = name
        known_steps, x_values = read_curve(log.records, *AXES[x][0])

        def to_x(
            steps: np.ndarray,
            known_steps: np.ndarray = known_steps,
            x_values: np.ndarray = x_values,
        ) -> Any:
            if x == "step":
                return steps
            if not len(known_steps):
                raise DataError(f"the log of a run has no {AXES[x][0][0]}: use --x step")
            return np.interp(steps, [0, *known_steps], [0, *x_values])

        steps, losses = read_curve(log.records, *((metric,) if metric else LOSS_NAMES))
        if len(steps):
            _draw_loss(panel, to_x(steps), losses, color).set_label(label)
            label = None
        steps, losses = read_curve(log.records, "eval_loss")
        if metric is None and len(steps):
            panel.plot(
                to_x(steps),
                losses,
                "o",
                color=color,
                markersize=5,
                markeredgecolor="white",
                label=label,
            )
    if not panel.lines:
        metric_names = metric or "train_loss or eval_loss"
        raise DataError(f"none of the runs has finite values of {metric_names} to plot over {x}")
    panel.set_ylabel(metric or "loss (nats); points: validation", color=TEXT_COLOR)
    panel.set_xlim(left=0)
    panel.set_xlabel(AXES[x][1], color=TEXT_COLOR)

    def minutes(seconds: float, _: object) -> str:
        return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"

    write = minutes if x == "time" else lambda value, _: format_count(value)
    panel.xaxis.set_major_formatter(FuncFormatter(write))
    panel.margins(y=0.06)
    _legend(panel, 2 if max(map(len, runs)) > 24 else 3)
    return save_figure(figure, Path(output_png))


def read_curve(records: Sequence[Record], *names: str) -> Curve:
    """Returns steps and finite values of the first of `names` that is in the records."""
    import numpy as np

    for name in names:
        points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            drawable = np.abs(values) < DRAWABLE  # false for NaN, too
            return steps[drawable], values[drawable]
    return np.empty(0), np.empty(0)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the centered running mean over `window` values, or fewer at the ends."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    # Average the same number of values on both sides. Otherwise the ends of a falling curve would
    # bend.
    half = np.minimum(window // 2, np.minimum(index, len(values) - 1 - index))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def _draw_loss(panel: Axes, x: np.ndarray, losses: np.ndarray, color: str) -> Line2D:
    """Draws a loss curve, smoothed if it has many values, and returns its main line."""
    marker: str | None = "."
    if len(losses) >= SMOOTH_FROM:
        panel.plot(x, losses, color=color, alpha=0.25, linewidth=0.8)
        losses, marker = smooth(losses, len(losses) // 25 | 1), None
    (line,) = panel.plot(x, losses, color=color, linewidth=1.8, marker=marker)
    return line


def _legend(panel: Axes, columns: int) -> None:
    panel.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=TEXT_COLOR,
    )


def format_count(number: float) -> str:
    """Formats a number in short form: 950, 12.5k, 3M, 1.2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def style_axes(panel: Axes) -> None:
    """Applies a plain style to the axes."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.grid(axis="y", color=GRID_COLOR, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(colors=TEXT_COLOR, labelsize=9, length=3, color="#999999")


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes the figure as PNG atomically, and returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    return path
