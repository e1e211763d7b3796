"""Synthetic logs of training runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

START = 1_000_000.0


def records(steps: int = 100, every: int = 5, **changes: Any) -> list[dict[str, Any]]:
    """Returns the log of a run with two seconds per step and an evaluation every 20 steps.

    Args:
        steps: The last step in the log.
        every: Number of steps between two entries.
        **changes: Changes to the settings of the run in the first entry.
    """
    log: list[dict[str, Any]] = [
        {"step": 0, "time": START, "run": {"total_steps": 100, "learning_rate": 1e-3, **changes}}
    ]
    for step in range(every, steps + 1, every):
        loss = 2 + 6 * math.exp(-step / 20)
        train = {"train_loss": loss, "train_learning_rate": 1e-3, "train_runtime": 2.0 * step}
        rates = {"train_tokens_per_second": 400.0, "train_mfu": 0.25, "peak_memory_gb": 1.5}
        tokens = {"tokens_seen": 800.0 * step, "epoch": step / 50}
        log.append({"step": step, "time": START + 2 * step, **train, **rates, **tokens})
        if step % 20 == 0:
            extra = {"eval_accuracy": step / 200, "eval_runtime": 1.0}
            log.append({"step": step, "time": START + 2 * step, "eval_loss": loss + 0.1, **extra})
    return log


def write_log(folder: Path, log: list[dict[str, Any]], tail: str = "") -> Path:
    """Writes a log to `folder`, with the text `tail` at its end, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in log)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder
