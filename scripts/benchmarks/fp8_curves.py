#!/usr/bin/env python
r"""Train the same model in bfloat16 and in both FP8 recipes, and lay the curves over each other.

    python scripts/benchmarks/fp8_curves.py roberta --work_dir runs -- scripts/run_mlm_flax.py \
        --model_type roberta --tokenizer_name my-roberta --train_file train.jsonl --max_steps 300

What follows ``--`` is a training script with its flags; --precision, --output_dir, --seed and
--logging_steps are added. bfloat16 is trained with two seeds: what lies between them is chance.
Writes docs/benchmarks/fp8_curves_NAME.json and .png. Runs that are finished are not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "bfloat16": ("bfloat16", 42),
    "bfloat16, another seed": ("bfloat16", 43),
    "fp8_delayed": ("fp8_delayed", 42),
    "fp8_current": ("fp8_current", 42),
}
# Steps over which a curve is averaged before it is compared.
WINDOW = 20


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, write."""
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the files, e.g. roberta")
    parser.add_argument("--work_dir", type=Path, required=True, help="where the runs go")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "benchmarks")
    options, command = parser.parse_args(given[:cut]), given[cut + 1 :]
    if not command:
        parser.error("give the training script and its flags after --")
    losses = {
        label: train(command, options.work_dir / f"{precision}-{seed}", precision, seed)
        for label, (precision, seed) in RUNS.items()
    }
    result = compare(options.name, command, losses)
    path = options.output_dir / f"fp8_curves_{options.name}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, path.with_suffix(".png"))
    for label, apart in result["apart"].items():
        print(f"{options.name}: {label} is {apart:.4f} nats from bfloat16 on average")
    return 0


def train(command: list[str], folder: Path, precision: str, seed: int) -> list[float]:
    """Run the script, if it has not been run, and return the loss of every step."""
    more = ("--precision", precision, "--seed", str(seed), "--logging_steps", "1",
            "--output_dir", str(folder), "--report_to", "jsonl")  # fmt: skip
    if not (folder / "train_results.json").exists():
        subprocess.run([sys.executable, *command, *more], check=True)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["train_loss"] for record in records if "train_loss" in record]


def compare(name: str, command: list[str], losses: dict[str, list[float]]) -> dict[str, Any]:
    """Say how far each averaged curve is from that of bfloat16, on average over the steps."""
    smooth = {label: smoothed(values) for label, values in losses.items()}
    plain = smooth["bfloat16"]
    apart = {
        label: float(np.abs(curve - plain).mean())
        for label, curve in smooth.items()
        if label != "bfloat16"
    }
    final = {label: float(curve[-1]) for label, curve in smooth.items()}
    shown = shlex.join(command)
    return {
        "name": name, "command": shown, "window": WINDOW,
        "apart": apart, "final_loss": final, "losses": losses,
    }  # fmt: skip


def smoothed(values: list[float]) -> np.ndarray:
    """Return the means of ``WINDOW`` steps at a time, moving."""
    width = min(WINDOW, len(values))
    return np.convolve(values, np.ones(width) / width, mode="valid")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the averaged curves, and below their distance from bfloat16."""
    from matplotlib.figure import Figure

    from hfseq.reports import plots

    figure = Figure(figsize=(8, 6), facecolor="white", layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
    colors = dict(zip(RUNS, ("#444444", "#b0b0b0", plots.TRAIN, plots.EVAL), strict=True))
    plain = smoothed(result["losses"]["bfloat16"])
    steps = np.arange(len(plain)) + result["window"]
    for label, values in result["losses"].items():
        curve = smoothed(values)
        style = {"color": colors[label], "linewidth": 1.4}
        panels[0].plot(steps, curve, label=f"{label}: {curve[-1]:.3f}", **style)
        if label != "bfloat16":
            panels[1].plot(steps, curve - plain, **style)
    panels[0].set_ylabel("training loss (nats)", color=plots.INK)
    panels[1].set_ylabel("minus bfloat16", color=plots.INK)
    panels[1].set_xlabel(f"step (means of {result['window']})", color=plots.INK)
    panels[1].axhline(0, color="#777777", linewidth=0.8)
    for panel in panels:
        plots.plain(panel)
        panel.margins(x=0.01)
    panels[0].legend(loc="upper right", frameon=False, fontsize=9, labelcolor=plots.INK)
    title = f"{result['name']} in FP8 and bfloat16"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.INK, weight="bold")
    plots.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
