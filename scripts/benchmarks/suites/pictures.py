"""The picture of a suite: bars of a number by case, or curves over what a case varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK, FAINT = "#333333", "#dddddd"
COLORS = ("#9a9a9a", "#b08a3e", "#3b76af", "#4f9d69", "#8a6bb1")
#: What ``PICTURE`` may name: the number of a row, and what the axis says.
BARS = {
    "ratio": ("ratio", "times as fast as PyTorch"),
    "memory": ("peak_memory_gb", "peak memory (GB)"),
    "seconds": ("median_seconds", "seconds"),
    "rate": ("rate", "a second"),
}


def draw(suite: Any, result: dict[str, Any], path: Path) -> Path | str | None:
    """Draw what the suite asks for; returns the path, or the reason why there is no picture."""
    if suite.PICTURE is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed"
    rows = [row for row in result["rows"] if row["median_seconds"]]
    if suite.PICTURE == "curves":
        curves = suite.curves(rows)
        if not curves:
            return "too few rows"
        figure = _curves(Figure, curves)
    else:
        number, label = BARS[suite.PICTURE]
        rows = [row for row in rows if row[number]]
        if not rows:
            return "nothing to compare"
        figure = _bars(Figure, rows, number, label)
    figure.suptitle(suite.TITLE, x=0.01, ha="left", fontsize=12, color=INK, weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")
    return path


def _plain(panel: Any) -> None:
    panel.set_facecolor("white")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(INK)
    panel.tick_params(colors=INK, labelsize=9)


def _bars(figures: Any, rows: list[dict], number: str, label: str) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    height = 0.8 / len(names)
    figure = figures(
        figsize=(9, 1.3 + 0.26 * len(cases) * max(len(names), 2)), facecolor="white",
        layout="constrained",
    )  # fmt: skip
    panel = figure.subplots()
    _plain(panel)
    for place, name in enumerate(names):
        own = [row for row in rows if row["name"] == name]
        ys = [cases.index(row["case"]) + (place - (len(names) - 1) / 2) * height for row in own]
        values = [row[number] for row in own]
        color = COLORS[place % len(COLORS)]
        panel.barh(ys, values, height * 0.9, color=color, label=name)
        for y, value in zip(ys, values, strict=True):
            panel.annotate(f"{value:.3g}", (value, y), xytext=(3, 0), textcoords="offset points",
                           va="center", fontsize=8, color=INK)  # fmt: skip
    if number == "ratio":
        panel.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    panel.set_yticks(range(len(cases)), cases)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel(label, color=INK)
    figure.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
    return figure


def _curves(figures: Any, panels: list[dict[str, Any]]) -> Any:
    """Each panel has ``x``, ``y`` (what the axes say) and ``lines``: name to (xs, ys)."""
    figure = figures(figsize=(4.6 * len(panels), 3.8), facecolor="white", layout="constrained")
    for panel, given in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _plain(panel)
        panel.grid(color=FAINT, linewidth=0.6)
        for place, (name, (xs, ys)) in enumerate(given["lines"].items()):
            color = COLORS[(place + 2) % len(COLORS)]
            panel.plot(xs, ys, color=color, marker="o", markersize=4, linewidth=1.5, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        ticks = sorted({x for xs, _ in given["lines"].values() for x in xs})
        panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
        panel.minorticks_off()
        panel.set_xlabel(given["x"], color=INK)
        panel.set_ylabel(given["y"], color=INK)
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
