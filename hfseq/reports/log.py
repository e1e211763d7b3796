"""Summaries of the log of a run: progress, throughput, results, problems.

All values come from `metrics.jsonl`, to which a run appends one line per record. While the run is
writing, the last line may be incomplete. The flags of a run come from its first record, or from
`training_args.json`.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hfseq.errors import DataError, parse_json

LOG_FILE = "metrics.jsonl"
FLAGS_FILE = "training_args.json"

#: Files that only finished runs contain.
RESULT_FILES = ("train_results.json", "eval_results.json")

#: Names of the training loss in current and older logs.
LOSS_NAMES = ("train_loss", "loss")

#: Metrics for which smaller is better, in addition to names that end in "_loss".
SMALLER_IS_BETTER = ("loss", "perplexity", "word_perplexity", "bits_per_byte")

#: Number of recent records for rates and the remaining time.
RECENT_RECORDS = 20

#: A loss counts as a spike if it exceeds the median of the previous SPIKE_WINDOW losses by more
#: than SPIKE_NATS nats and by more than the fraction SPIKE_SHARE of the median.
SPIKE_SHARE, SPIKE_NATS, SPIKE_WINDOW = 0.25, 0.5, 10

#: A run counts as ended if it has added no record for more than SILENT_INTERVALS times the median
#: interval between records, and for more than SILENT_SECONDS seconds.
SILENT_INTERVALS, SILENT_SECONDS = 10, 300

#: Flags about paths and output, which do not affect training.
IGNORED_FLAGS = (
    *("output_dir", "run_name", "report_to", "hub_model_id", "push_to_hub", "disable_tqdm"),
    *("overwrite_output_dir", "data_cache_dir", "compilation_cache_dir", "cache_dir", "debug"),
    *("resume_from_checkpoint", "overwrite_cache", "hub_strategy", "hub_private_repo"),
    "hub_timeout",
)

Record = dict[str, Any]


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of a `metrics.jsonl` in file order. Incomplete lines are skipped."""
    return [record for _, record in read_lines(path)]


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, Record]]:
    """Yields each complete line of a `metrics.jsonl`, and its record."""

    def is_valid(name: str, value: object) -> bool:
        if name == "run":
            return isinstance(value, dict)
        if isinstance(value, int):  # larger integers are not metrics, and overflow a float
            return abs(value) < 2**63
        number = isinstance(value, float) or (value is None and name != "time")
        return name == "text" or number

    with Path(path).open("rb") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:  # incomplete after a crash
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                valid_record = {name: v for name, v in record.items() if is_valid(name, v)}
                if "step" in valid_record:
                    yield line, valid_record


def smaller_is_better(name: str) -> bool:
    """Returns whether smaller values of a metric are better, with or without the prefix "eval_"."""
    plain = name.removeprefix("eval_")
    return plain in SMALLER_IS_BETTER or plain.endswith("_loss")


class RunLog:
    """The log of a run.

    Args:
        path: The output directory of the run, or the log file.

    Raises:
        DataError: The log does not exist, or is empty.
    """

    def __init__(self, path: str | Path):
        path = Path(path).expanduser()
        if not path.exists():
            raise DataError(
                f"'{path}' does not exist (in '{Path.cwd()}'): use the output_dir of a run"
            )
        self.file = path / LOG_FILE if path.is_dir() else path
        self.folder = self.file.parent
        if not self.file.is_file():
            raise DataError(
                f"{path} has no {LOG_FILE}: is it the --output_dir of a run with --report_to jsonl?"
            )
        with self.file.open("rb") as file:
            file.seek(max(0, self.file.stat().st_size - 1))
            self.is_truncated = file.read(1) not in (b"", b"\n")
        self.records = read_metrics(self.file)
        if not self.records:
            raise DataError(f"{self.file} contains no records: nothing was logged yet")

    @property
    def name(self) -> str:
        """The name of the output directory."""
        return self.folder.resolve().name

    def flags(self) -> Record:
        """Returns the flags of the run that the log or `training_args.json` contains."""
        flags: Record = {}
        path = self.folder / FLAGS_FILE
        if path.is_file():
            try:
                content = parse_json(path.read_bytes())
                flags = content if isinstance(content, dict) else {}
            except (OSError, ValueError):  # optional: the log may contain the flags
                flags = {}
        for record in self.starts():
            flags = {**flags, **record["run"]}
        return flags

    def starts(self) -> list[Record]:
        """Returns the records that were written when the run started or resumed."""
        return [record for record in self.records if isinstance(record.get("run"), dict)]

    def points(self, *names: str) -> list[tuple[int, float]]:
        """Returns finite (step, value) pairs of the first of `names` that the log contains."""
        for name in names:
            points = [(r["step"], float(r[name])) for r in self.records if _finite(r.get(name))]
            if points:
                return points
        return []

    def train_records(self) -> list[Record]:
        """Returns the records of training steps."""
        return [record for record in self.records if any(name in record for name in LOSS_NAMES)]

    def evaluations(self) -> list[Record]:
        """Returns one record per step with all evaluation metrics of that step."""
        steps: dict[int, Record] = {}
        for record in self.records:
            metrics = {k: v for k, v in record.items() if k.startswith("eval_") and _number(v)}
            if metrics:
                steps.setdefault(record["step"], {"step": record["step"]}).update(metrics)
        return [steps[step] for step in sorted(steps)]

    @property
    def step(self) -> int:
        """The last step."""
        return max(record["step"] for record in self.records)

    def status(self, total: int | None, silence: float) -> str:
        """Returns "finished", "running", "stopped", or "ended".

        A run is "finished" if it has reached its last step, and "running" while new records appear.
        After a long time without a new record, it is "stopped" if its last step is known. If the
        last step is not known, it is "finished" if its directory contains result files, and
        "ended" otherwise.

        Args:
            total: The last step of the run, if it is known.
            silence: Seconds since the last record.
        """
        if total is not None and self.step >= total:
            return "finished"
        recent = self.train_records()[-RECENT_RECORDS:]
        times = [float(record["time"]) for record in recent if _number(record.get("time"))]
        gaps = [following - previous for previous, following in itertools.pairwise(times)]
        if silence < max(SILENT_SECONDS, SILENT_INTERVALS * (median(gaps) if gaps else 0.0)):
            return "running"
        if total is not None:
            return "stopped"
        return (
            "finished" if any((self.folder / name).exists() for name in RESULT_FILES) else "ended"
        )

    def best(self) -> Record | None:
        """Returns the best evaluation, by the metric with which the run selects checkpoints."""
        flags = self.flags()
        name = flags.get("metric_for_best_model") or "eval_loss"
        name = name if str(name).startswith("eval_") else f"eval_{name}"
        greater = flags.get("greater_is_better")
        if greater is None:
            greater = not smaller_is_better(name)
        candidates = [record for record in self.evaluations() if _finite(record.get(name))]
        choose = max if greater else min
        best = choose(candidates, key=lambda record: float(record[name]), default=None)
        return best and {"metric": name, "value": best[name], "step": best["step"]}

    def warnings(self, status: str, total: int | None) -> Iterator[str]:
        """Yields messages about problems.

        These are losses that are not finite, spikes of the loss, a run that stopped early, and an
        incomplete last line of the log.

        Args:
            status: The result of `status`.
            total: The last step of the run, if it is known.
        """
        points = self.points(*LOSS_NAMES)
        spikes = []
        for at in range(SPIKE_WINDOW, len(points)):
            usual = median(value for _, value in points[at - SPIKE_WINDOW : at])
            if points[at][1] > usual + max(SPIKE_NATS, SPIKE_SHARE * abs(usual)):
                spikes.append(points[at][0])
        train = self.train_records()
        bad = [r["step"] for r in train if not any(_finite(r.get(name)) for name in LOSS_NAMES)]
        for steps, problem in ((bad, "was NaN or infinite"), (spikes, "jumped up")):
            if steps:
                step_list = ", ".join(f"{at:,}" for at in steps[:6])
                omitted = f" and {len(steps) - 6} more" if len(steps) > 6 else ""
                plural = "s" if len(steps) > 1 else ""
                yield f"the loss {problem} at step{plural} {step_list}{omitted}"
        if status == "stopped":
            yield f"stopped at step {self.step:,} of {total:,}; run the same command to resume"
        if self.is_truncated:
            yield "the last line of the log is incomplete (still being written, or truncated)"


def summarize(log: RunLog, now: float | None = None) -> Record:
    """Summarizes the log of a run.

    Args:
        log: The log.
        now: The current time. Default: the system time.

    Returns:
        Values of JSON types by name. Unknown values are `None`.
    """
    flags, train, step = log.flags(), log.train_records(), log.step
    last = {name: value for record in train for name, value in record.items()}
    totals = (flags.get(name) for name in ("total_steps", "max_steps"))
    total = next((value for value in totals if isinstance(value, int) and value > 0), None)
    losses = log.points(*LOSS_NAMES)
    silence = (now or time.time()) - float(log.records[-1].get("time") or 0)
    status = log.status(total, silence)
    to_go = None
    timed = [record for record in train[-RECENT_RECORDS:] if _number(record.get("train_runtime"))]
    if total and status == "running" and len(timed) > 1:
        steps = timed[-1]["step"] - timed[0]["step"]
        seconds = max(0.0, timed[-1]["train_runtime"] - timed[0]["train_runtime"])
        to_go = (total - step) * (seconds / steps) if steps > 0 and seconds > 0 else None
    return {
        "name": log.name,
        "file": str(log.file),
        "status": status,
        "step": step,
        "total_steps": total,
        "epoch": last.get("epoch"),
        "tokens_seen": last.get("tokens_seen"),
        "seconds": last.get("train_runtime"),
        "seconds_since_last_record": silence,
        "seconds_to_go": to_go,
        "tokens_per_second": _recent(train, "tokens_per_second"),
        "mfu": _recent(train, "mfu"),
        "peak_memory_gb": last.get("peak_memory_gb"),
        "learning_rate": last.get("train_learning_rate"),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": losses[-1][1] if losses else None,
        "best": log.best(),
        "evaluations": log.evaluations(),
        "resumed_at": [record["step"] for record in log.starts() if record["step"]],
        "warnings": list(log.warnings(status, total)),
    }


def _recent(train: Sequence[Record], name: str) -> float | None:
    """Returns the median of a rate over the last records that contain it.

    The records contain the rate as `name` or as `train_name`.
    """
    keys = (name, f"train_{name}")
    rates = [record[key] for record in train for key in keys if _finite(record.get(key))]
    return float(median(rates[-RECENT_RECORDS:])) if rates else None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def unique_names(logs: Sequence[RunLog]) -> dict[str, RunLog]:
    """Returns the runs by unique names.

    The name of a run is the name of its directory. If several runs have the same name, the names of
    parent directories are added.

    Raises:
        DataError: A run is specified twice.
    """
    paths = [log.folder.resolve() for log in logs]
    if len(set(paths)) < len(paths):
        raise DataError(f"{next(p for p in paths if paths.count(p) > 1)} is specified twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {"/".join(p.parts[-depth:]): log for p, log in zip(paths, logs, strict=True)}


def compare(logs: Sequence[RunLog]) -> Record:
    """Compares several runs.

    Returns:
        Values of JSON types: a summary of each run, the flags that differ between runs, and the
        names of the runs whose flags are unknown.
    """
    runs = unique_names(logs)
    flags = {
        name: {key: value for key, value in log.flags().items() if value not in (None, [])}
        for name, log in runs.items()
    }
    known_flags = {name: run_flags for name, run_flags in flags.items() if run_flags}
    keys = {
        key for run_flags in known_flags.values() for key in run_flags if key not in IGNORED_FLAGS
    }
    different = {
        key: {name: run_flags.get(key) for name, run_flags in known_flags.items()}
        for key in sorted(keys)
        if len({repr(run_flags.get(key)) for run_flags in known_flags.values()}) > 1
    }
    return {
        "runs": {name: summarize(log) for name, log in runs.items()},
        "different_flags": different,
        "without_flags": [name for name, run_flags in flags.items() if not run_flags],
    }
