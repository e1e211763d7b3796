"""The pictures of the VQ benchmark: time and memory over the length, and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfseq.reports import plots

COLORS = (plots.TRAIN, "#4f9d69", "#8a6bb1", "#7a7a7a")


def _panels(count: int, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), facecolor="white", layout="constrained")
    panels = figure.subplots(1, count)
    for panel in panels:
        plots.plain(panel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.INK, weight="bold")
    return figure, panels


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw time per token and memory over the length, both logarithmic; returns ``path``."""
    what = "a training step" if result["what"] == "train" else "the forward pass"
    figure, (left, right) = _panels(2, f"Cost of {what} over the length of the text")
    vq = 0
    for curve in result["curves"]:
        full = curve["name"] == "full"
        color = plots.EVAL if full else COLORS[vq % len(COLORS)]
        vq += not full
        heads = {each["head_type"] for each in result["curves"]}
        label = curve["name"] + (f", {curve['head_type']}" if len(heads) > 1 else "")
        _line(left, curve["lengths"], curve["microseconds_per_token"], label, color)
        megabytes = [size / 1e6 for size in curve["compiled_bytes"]]
        _line(right, curve["memory_lengths"], megabytes, label, color)
        for panel in (left, right):
            _mark_missing(panel, curve["does_not_fit"], color)
    for panel, text in ((left, "microseconds a token"), (right, "memory by XLA's plan (MB)")):
        _axes(panel, result["options"]["lengths"], text)
        if len(result["curves"]) > 2:  # names at the ends would lie on each other
            for name in panel.texts:
                name.set_visible(False)
            panel.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=plots.INK)
    if any(curve["does_not_fit"] for curve in result["curves"]):
        limit = result["options"]["memory_gb"]
        left.text(0.98, 0.02, f"x: needs more than {limit:.0f} GB, not run", ha="right",
                  fontsize=8, color=plots.INK, transform=left.transAxes)  # fmt: skip
    return plots.save(figure, path)


def _line(panel: Any, xs: list[int], ys: list[float], label: str, color: str) -> None:
    """Draw a curve and write its name at its end."""
    if not xs:
        return
    panel.plot(xs, ys, color=color, linewidth=1.6, marker="o", markersize=4.5, label=label)
    panel.annotate(label, (xs[-1], ys[-1]), xytext=(-2, 7), textcoords="offset points", ha="right",
                   fontsize=9, color=color)  # fmt: skip


def _mark_missing(panel: Any, lengths: list[int], color: str) -> None:
    """Put a cross on the upper edge for each length that does not fit."""
    for length in lengths:
        panel.plot([length], [0.985], marker="x", color=color, clip_on=False, markersize=7,
                   transform=panel.get_xaxis_transform())  # fmt: skip


def _axes(panel: Any, lengths: list[int], text: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.margins(x=0.04, y=0.18)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted(lengths))
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    )
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
    panel.set_xlabel("tokens", color=plots.INK)
    panel.set_ylabel(text, color=plots.INK)


def draw_decoding(result: dict[str, Any], path: Path) -> Path:
    """Draw speed and memory over the tokens that were decoded; returns ``path``."""
    figure, (left, right) = _panels(2, "Decoding with a state of fixed size")
    for number, row in enumerate(result["rows"]):
        tokens = [each["tokens"] for each in row["chunks"]]
        color = COLORS[number % len(COLORS)]
        label = row["head_type"]
        _line(left, tokens, [each["tokens_per_second"] for each in row["chunks"]], label, color)
        memory = [each["memory_bytes"] / 1e6 for each in row["chunks"]]
        _line(right, tokens, memory, label, color)
    for panel, text in ((left, "tokens a second"), (right, "memory in use (MB)")):
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.margins(y=0.2)
        panel.set_ylim(top=panel.get_ylim()[1] * 1.15)
        panel.xaxis.set_major_formatter(lambda n, _: plots.short(n))
        panel.set_xlabel("tokens decoded", color=plots.INK)
        panel.set_ylabel(text, color=plots.INK)
    return plots.save(figure, path)
