#!/usr/bin/env python
r"""Writes the first table and the plot of docs/benchmarks.md from the recorded results.

    python scripts/benchmarks/summary.py            # writes both
    python scripts/benchmarks/summary.py --check    # only checks whether the table is up to date

Reads docs/benchmarks/run_{train,inference,generation}.json and translate.json, and the files with
the suffix ``_xeon`` for the second processor. It does not measure anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- summary: scripts/benchmarks/summary.py -->", "<!-- /summary -->"
#: The parts of the table: title, name of the JSON file with the results, and unit of the rates.
PARTS = (
    ("Training", "run_train", "tokens/s"),
    ("Inference", "run_inference", "tokens/s"),
    ("Generation", "run_generation", "new tokens/s"),
    ("Translation", "translate", "sentences/s"),
)
#: Speeds relative to eager PyTorch, which are columns of the table and markers of the plot.
RATIOS = ("hfseq", "hfseq bfloat16", "hfseq on the Xeon", "torch.compile")
BLUE, ORANGE, GRAY, INK, FAINT = "#3b76af", "#d95f30", "#8a8a8a", "#333333", "#dddddd"


@dataclasses.dataclass
class Case:
    """The results of a model with one size.

    Attributes:
        name: Name of the model with its size.
        rate: Rate of hfseq in float32.
        ratios: Speeds relative to eager PyTorch. The keys are those of ``RATIOS``.
    """

    name: str
    rate: float = 0.0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)


def cases(folder: Path, record: str) -> list[Case]:
    """Returns the cases of a part that were measured, in the order of the JSON file."""
    cases_by_name: dict[str, Case] = {}
    for suffix in ("", "_xeon"):
        path = folder / f"{record}{suffix}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        for row in (row for row in rows if row["status"] == "ok"):
            contestant, dtype = row["name"], "float32"
            if "sentences_per_second" in row:
                if " " in contestant:  # hfseq in bfloat16, which is compared with float32 here
                    continue
                name, rate = f"Marian-base, {row['group']}, batch 64", row["sentences_per_second"]
                ratio = row["ratios"].get("PyTorch")
            else:
                name, _, dtype = row["case"].rpartition(", ")
                rate, ratio = row["rate"], row["ratio"]
            case = cases_by_name.setdefault(name, Case(name))
            if contestant not in ("hfseq", "torch.compile") or ratio is None:
                continue
            if not suffix and dtype == "float32":
                case.ratios[contestant] = ratio
                case.rate = rate if contestant == "hfseq" else case.rate
            elif contestant == "hfseq":
                case.ratios["hfseq on the Xeon" if suffix else f"hfseq {dtype}"] = ratio
    return list(cases_by_name.values())


def table(folder: Path) -> str:
    """Returns the table of all parts as Markdown."""
    lines = [
        "| | rate | speed-up | bfloat16 | Xeon | compiled |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for title, record, unit in PARTS:
        lines.append(f"| **{title}**, {unit} | | | | | |")
        for case in cases(folder, record):
            rate = f"{case.rate:,.{0 if case.rate >= 100 else 1}f}"
            ratios = [f"{case.ratios[key]:.2f}" if key in case.ratios else "–" for key in RATIOS]
            ratios[0] = f"**{ratios[0]}**"
            lines.append("| " + " | ".join([case.name, rate, *ratios]) + " |")
    return "\n".join(lines)


def plot_summary(folder: Path, path: Path) -> None:
    """Plots all parts and saves the image."""
    from matplotlib.figure import Figure

    parts = [(title, cases(folder, record)) for title, record, _ in PARTS]
    figure = Figure(figsize=(6, 6.6), facecolor="white", layout="constrained")
    panels = figure.subplots(
        len(parts),
        1,
        sharex=True,
        height_ratios=[len(panel_cases) + 0.6 for _, panel_cases in parts],
    )
    for panel, (title, panel_cases) in zip(panels, parts, strict=True):
        plot_panel(panel, title, panel_cases)
    panels[-1].set_xlabel("times as fast as eager PyTorch", color=INK)
    handles = {line.get_label(): line for panel in panels for line in panel.lines}
    handles = {label: handle for label, handle in handles.items() if label in RATIOS}
    figure.legend(
        handles.values(),
        [f"{label}, float32" if label == "hfseq" else label for label in handles],
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handletextpad=0.1,
        columnspacing=0.9,
    )
    figure.savefig(path, dpi=150, metadata={"Software": None})


def plot_panel(panel: Axes, title: str, cases: list[Case]) -> None:
    """Plots the ratios of the cases of a part."""
    styles = {
        "hfseq": {"marker": "o", "color": BLUE, "markersize": 8, "zorder": 5},
        "torch.compile": {"marker": "|", "color": GRAY, "markersize": 11, "markeredgewidth": 2.5},
        "hfseq bfloat16": {"marker": "D", "color": ORANGE, "markersize": 6, "zorder": 4},
        "hfseq on the Xeon": {
            "marker": "o",
            "color": BLUE,
            "markersize": 7,
            "markerfacecolor": "white",
            "zorder": 3,
        },
    }
    rows = range(len(cases))
    for label, style in styles.items():
        points = [
            (case.ratios[label], row)
            for row, case in zip(rows, cases, strict=True)
            if label in case.ratios
        ]
        if points:
            panel.plot(*zip(*points, strict=True), label=label, linestyle="none", **style)
    panel.axvline(1, color=INK, linewidth=1)
    panel.grid(axis="x", color=FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.set_yticks(rows, [case.name for case in cases], color=INK, fontsize=9.5)
    panel.tick_params(axis="both", length=0, labelcolor=INK)
    panel.set_ylim(len(cases) - 0.5, -0.6)
    panel.set_title(title, loc="left", fontsize=10.5, color=INK, weight="bold", pad=4)
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)


def main(check: bool = False, docs: Path = ROOT / "docs") -> int:
    """Writes or checks the table and the plot. Returns the exit code."""
    page = docs / "benchmarks.md"
    old = page.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        print(f"{page}: {BEGIN} and {END} must occur exactly once each", file=sys.stderr)
        return 1
    block = f"{BEGIN}\n\n{table(docs / 'benchmarks')}\n\n{END}"
    new = re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, old, flags=re.S)
    if check:
        if old != new:
            print(f"{page} does not match the records. Run python scripts/benchmarks/summary.py")
        return int(old != new)
    page.write_text(new, encoding="utf-8")
    plot_summary(docs / "benchmarks", docs / "benchmarks" / "summary.png")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the table without writing")
    sys.exit(main(parser.parse_args().check))
