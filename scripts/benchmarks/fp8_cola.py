#!/usr/bin/env python
r"""Train Transformer Engine's encoder example on CoLA in its four ways, against its limits.

    python scripts/benchmarks/fp8_cola.py --cola cola/raw --work_dir runs
    python scripts/benchmarks/fp8_cola.py --cola cola/raw --work_dir runs --rows multiprocess

The limits are those that the example's own tests assert on loss and accuracy of the last training
epoch (specification, table 3.3; where it has none for a recipe, that of bfloat16 plus 0.01).
Validation is on both development files together, as in GLUE. Runs that are finished are not run
again. Writes docs/benchmarks/fp8_cola.json. Exit code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("bfloat16", "fp8_delayed", "fp8_current")
COMMON = (
    *("--model_type", "fp8_encoder", "--preset", "te", "--vocabulary", "words"),
    *("--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--weight_decay", "1e-4"),
)
GATED = ("--config_overrides", "hidden_act=geglu,flatten_length=64", "--max_seq_length", "64")
PLAIN = ("--config_overrides", "flatten_length=64", "--max_seq_length", "64")
# Flags, devices of a process, processes, and (loss at most, accuracy at least) by recipe.
ROWS: dict[str, tuple[tuple[str, ...], int, int, dict[str, tuple[float, float]]]] = {
    "single": (
        (*("--max_seq_length", "32", "--per_device_train_batch_size", "64"),
         *("--num_train_epochs", "3", "--logging_steps", "134")),
        1, 1,
        {"bfloat16": (0.452, 0.788), "fp8_delayed": (0.457, 0.784), "fp8_current": (0.461, 0.784)},
    ),
    "dp": (
        (*("--max_seq_length", "32", "--mesh", "data=8", "--per_device_train_batch_size", "64"),
         *("--num_train_epochs", "5", "--logging_steps", "17")),
        8, 1,
        {"bfloat16": (0.51, 0.75), "fp8_delayed": (0.51, 0.75), "fp8_current": (0.51, 0.749)},
    ),
    "tp": (
        (*GATED, "--mesh", "data=4,tensor=2", "--per_device_train_batch_size", "64",
         "--num_train_epochs", "5", "--logging_steps", "34"),
        8, 1,
        {"bfloat16": (0.36, 0.84), "fp8_delayed": (0.362, 0.84), "fp8_current": (0.37, 0.83)},
    ),
    "tp-sp": (
        (*GATED, "--mesh", "data=4,tensor=2", "--sequence_parallel",
         "--per_device_train_batch_size", "64", "--num_train_epochs", "5", "--logging_steps", "34"),
        8, 1,
        {"bfloat16": (0.36, 0.84), "fp8_delayed": (0.362, 0.84), "fp8_current": (0.37, 0.83)},
    ),
    "multiprocess": (
        (*PLAIN, "--mesh", "data=2,tensor=2", "--per_device_train_batch_size", "128",
         "--num_train_epochs", "5", "--logging_steps", "34"),
        1, 4,
        {"bfloat16": (0.43, 0.80), "fp8_delayed": (0.43, 0.80), "fp8_current": (0.432, 0.80)},
    ),
}  # fmt: skip


def main() -> int:
    """Run what is missing, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cola", type=Path, required=True, help="the folder raw/ of CoLA")
    parser.add_argument("--work_dir", type=Path, required=True, help="where the runs go")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--table_only", action="store_true", help="run nothing")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    path = options.output_dir / "fp8_cola.json"
    # What was measured before and is not run now stays.
    known = json.loads(path.read_text()) if path.exists() else []
    found = {(one["row"], one["recipe"]): one for one in known}
    for row in options.rows:
        for recipe in options.recipes:
            folder = options.work_dir / f"{row}-{recipe}"
            if not options.table_only and not (folder / "eval_results.json").exists():
                run(row, recipe, folder, options.cola)
            if (folder / "eval_results.json").exists():
                found[row, recipe] = judge(row, recipe, folder)
    pairs = [(row, recipe) for row in ROWS for recipe in RECIPES]
    results = [found[pair] for pair in pairs if pair in found]
    path.write_text(json.dumps(results, indent=1) + "\n")
    for line in table(results):
        print(line)
    return 0 if all(result["within"] for result in results) else 1


def flags(row: str, recipe: str, folder: Path | str, cola: Path | str) -> list[str]:
    """Return the command of one run."""
    development = [f"{cola}/{name}_dev.tsv" for name in ("in_domain", "out_of_domain")]
    return [
        "scripts/run_classification_flax.py", "--output_dir", str(folder),
        "--train_file", f"{cola}/in_domain_train.tsv", "--validation_file", *development,
        "--precision", recipe, *COMMON, *ROWS[row][0],
    ]  # fmt: skip


def run(row: str, recipe: str, folder: Path, cola: Path) -> None:
    """Run one command, in as many processes as its row has."""
    _, devices, processes, _ = ROWS[row]
    where = dict(os.environ)
    if where.get("JAX_PLATFORMS") == "cpu":
        where["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, *flags(row, recipe, folder.absolute(), cola.absolute())]
    if processes == 1:
        subprocess.run(command, check=True, cwd=ROOT, env=where)
        return
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*command, "--coordinator_address", address, "--num_processes", str(processes),
             "--process_id", str(number)],
            cwd=ROOT, env=where,
        )
        for number in range(processes)
    ]  # fmt: skip
    if any([process.wait() for process in started]):
        raise SystemExit(f"{row} {recipe}: a process failed")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def judge(row: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Compare the last epoch of a run with the limits of its row."""
    train, evaluation = (
        json.loads((folder / f"{part}_results.json").read_text()) for part in ("train", "eval")
    )
    loss, accuracy = ROWS[row][3][recipe]
    return {
        "row": row, "recipe": recipe, "command": " ".join(flags(row, recipe, "OUT", "$COLA/raw")),
        "processes": ROWS[row][2], "devices": ROWS[row][1] * ROWS[row][2],
        "train_loss": train["train_loss"], "loss_limit": loss,
        "train_accuracy": train["train_accuracy"], "accuracy_limit": accuracy,
        "eval_accuracy": evaluation["eval_accuracy"],
        "eval_matthews_correlation": evaluation["eval_matthews_correlation"],
        "within": train["train_loss"] <= loss and train["train_accuracy"] >= accuracy,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| Way | Recipe | Loss (at most) | Accuracy (at least) | Validation accuracy | Matthews |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in results:
        loss, accuracy = (
            f"{one[f'train_{name}']:.3f} ({one[f'{name}_limit']:g})"
            for name in ("loss", "accuracy")
        )
        lines.append(
            f"| {one['row']} | {one['recipe']} | {loss} | {accuracy} | "
            f"{one['eval_accuracy']:.3f} | {one['eval_matthews_correlation']:.3f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
