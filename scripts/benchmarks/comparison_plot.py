"""The picture of a comparison: both losses, and how far the first ones part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hfseq.reports import plots

THEIRS = "#b08a3e"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw the losses and, below, the differences of the first steps; returns ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), facecolor="white", layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=[3, 2])
    for panel in panels:
        plots.plain(panel)
    _losses(panels[0], result)
    _differences(panels[1], result)
    panels[0].legend(loc="upper right", frameon=False, fontsize=9, labelcolor=plots.INK)
    title = f"{result['model']} ({result['objective']}), hfseq and PyTorch"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.INK, weight="bold")
    return plots.save(figure, path)


def _losses(panel: Any, result: dict[str, Any]) -> None:
    for number, other in enumerate(result["pytorch"]):
        label = f"PyTorch, seed {other['seed']}: {other['final_loss']:.3f}"
        style = {"color": THEIRS, "dashes": plots.DASHES[number % len(plots.DASHES)]}
        _curve(panel, other["losses"], label, linewidth=1.1, **style)
    label = f"hfseq: {result['final_loss']:.3f}"
    _curve(panel, result["hfseq"]["losses"], label, color=plots.TRAIN, linewidth=1.6, alpha=0.85)
    panel.set_ylabel("training loss (nats)", color=plots.INK)
    panel.set_xlabel("step", color=plots.INK)
    panel.margins(x=0.01, y=0.06)


def _curve(panel: Any, losses: list[float], label: str, **style: Any) -> None:
    values = np.asarray(losses)
    if len(values) >= plots.SMOOTH_FROM:
        values = plots.smooth(values, len(values) // 25 | 1)
    panel.plot(np.arange(1, len(values) + 1), values, label=label, **style)


def _differences(panel: Any, result: dict[str, Any]) -> None:
    values = np.asarray(result["differences"])
    values = np.where(values > 0, values, np.nan)  # a logarithm has no place for equal losses
    panel.plot(np.arange(1, len(values) + 1), values, color=plots.TRAIN, linewidth=1.2, marker=".")
    panel.axhline(1e-3, color="#777777", linewidth=1.1, dashes=plots.DASHES[0])
    panel.set_yscale("log")
    panel.set_ylabel("|loss difference|", color=plots.INK)
    panel.set_xlabel(f"step (largest: {result['max_difference']:.1e})", color=plots.INK)
    panel.margins(x=0.01)
