#!/usr/bin/env python
"""Lay the learning curves of VQ and quadratic runs over each other, with the spread of their seeds.

    python scripts/benchmarks/vq_quality.py --output_dir comparison \\
        full=runs/full-0 full=runs/full-1 vq=runs/vq-0 vq_quadratic=runs/vq_quadratic-0

Each folder is the ``--output_dir`` of a finished run of run_clm_flax.py with ``--bits_per_byte``.
Writes ``comparison.json`` (bits per byte of each run, means, the ratio to the first name) and
``comparison.png`` (training loss in bits over the steps; the codes in use).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from hfseq.errors import UsageError, run_command
from hfseq.reports import plots

COLORS = (plots.EVAL, plots.TRAIN, "#4f9d69", "#8a6bb1")


def read(folder: Path) -> dict[str, Any]:
    """Return the curves and the last evaluation of a run."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UsageError(f"{folder} has no metrics.jsonl: give the --output_dir of a finished run")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = {name: value for record in records for name, value in record.items()}
    if "eval_bits_per_byte" not in last:
        raise UsageError(f"{folder} was not evaluated with --bits_per_byte")
    steps = [record for record in records if "train_loss" in record]
    return {
        "steps": [record["step"] for record in steps],
        "train_bits_per_token": [record["train_loss"] / math.log(2) for record in steps],
        "code_perplexity": [record.get("train_code_perplexity") for record in steps],
        "bits_per_byte": last["eval_bits_per_byte"],
    }


def compare(runs: list[tuple[str, Path]]) -> dict[str, Any]:
    """Return the runs by name, and each name's mean beside that of the first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, folder in runs:
        found.setdefault(name, []).append(read(folder))
    means = {n: statistics.mean(r["bits_per_byte"] for r in rs) for n, rs in found.items()}
    baseline = next(iter(means.values()))
    return {
        "runs": found,
        "bits_per_byte": {n: [r["bits_per_byte"] for r in rs] for n, rs in found.items()},
        "mean": means,
        "ratio": {name: mean / baseline for name, mean in means.items()},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the losses and the codes in use."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (name, runs) in enumerate(result["runs"].items()):
        color = COLORS[place % len(COLORS)]
        for seed, run in enumerate(runs):
            style = {"color": color, "linewidth": 1.4, "alpha": 1.0 if seed == 0 else 0.45}
            style["linestyle"] = "--" if place == 2 else "-"
            label = f"{name} ({result['mean'][name]:.3f})" if seed == 0 else None
            left.plot(run["steps"][1:], run["train_bits_per_token"][1:], label=label, **style)
            if name != "full" and None not in run["code_perplexity"]:
                right.plot(run["steps"], run["code_perplexity"], **style)
    for panel, text in (
        (left, "training loss (bits a token)"),
        (right, "codes in use (perplexity)"),
    ):
        plots.plain(panel)
        panel.set_xlabel("step", color=plots.INK)
        panel.set_title(text, loc="left", fontsize=10, color=plots.INK)
    right.set_ylim(bottom=0)
    left.legend(
        title="(bits per byte, validation)", frameon=False, fontsize=9, labelcolor=plots.INK,
        title_fontsize=8,
    )  # fmt: skip
    plots.save(figure, path)


def main() -> int:
    """Read the runs, write the comparison, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    pairs = [run.partition("=") for run in arguments.runs]
    wrong = [run for run, pair in zip(arguments.runs, pairs, strict=True) if not pair[2]]
    if wrong:
        raise UsageError(f"{wrong[0]} is not NAME=DIR, such as full=runs/full-0")
    result = compare([(name, Path(folder)) for name, _, folder in pairs])
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "comparison.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, arguments.output_dir / "comparison.png")
    for name, mean in result["mean"].items():
        values = ", ".join(f"{value:.4f}" for value in result["bits_per_byte"][name])
        print(f"{name}: {mean:.4f} bits per byte, {result['ratio'][name]:.4f} times ({values})")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
