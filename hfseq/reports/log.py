"""What the log of a run says: how far it is, how fast, how well, and what went wrong.

Everything comes from ``metrics.jsonl``, which is whole but for its last line while a run writes it;
flags come from the record that a run begins with, or from ``training_args.json``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hfseq import errors
from hfseq.errors import DataError

#: Metrics of which less is better, and all that end with "_loss".
SMALLER = ("loss", "perplexity", "word_perplexity", "bits_per_byte")


def smaller_is_better(name: str) -> bool:
    """Tell of which metrics the smallest is the best, with or without the prefix "eval_"."""
    plain = name.removeprefix("eval_")
    return plain in SMALLER or plain.endswith("_loss")


LOG = "metrics.jsonl"


FLAGS = "training_args.json"


#: Files that only a run that came to its end writes.
RESULTS = ("train_results.json", "eval_results.json")


LOSS = ("train_loss", "loss")


#: Recent records that rates and the time to go are taken from.
RECENT = 20


#: A loss so much above the median of those before it is a spike: a share of it, and nats.
SPIKE_SHARE, SPIKE_NATS, SPIKE_WINDOW = 0.25, 0.5, 10


#: A run that has written nothing for so many of its usual intervals, and seconds, has ended.
SILENT_INTERVALS, SILENT_SECONDS = 10, 300


Record = dict[str, Any]


class RunLog:
    """The log of one run; ``path`` is its output directory or the log itself.

    **Raises:** DataError where there is no log, or nothing in it.
    """

    def __init__(self, path: str | Path):

        path = Path(path).expanduser()
        if not path.exists():
            raise DataError(f"there is no '{path}' (in '{Path.cwd()}'): give a run's output_dir")
        self.file = path / LOG if path.is_dir() else path
        self.folder = self.file.parent
        if not self.file.is_file():
            raise DataError(
                f"{path} has no {LOG}: is it the --output_dir of a run with --report_to jsonl?"
            )
        with self.file.open("rb") as file:
            file.seek(max(0, self.file.stat().st_size - 1))
            self.torn = file.read(1) not in (b"", b"\n")
        self.records: list[Record] = read_metrics(self.file)
        if not self.records:
            raise DataError(f"{self.file} holds no records yet: nothing was logged")

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.folder.resolve().name

    def flags(self) -> Record:
        """Return the flags of the run, as far as they are known."""
        found: Record = {}
        path = self.folder / FLAGS
        if path.is_file():
            try:
                read = errors.parse_json(path.read_bytes())
                found = read if isinstance(read, dict) else {}
            except (OSError, ValueError):  # the log is what is asked for
                found = {}
        for record in self.starts():
            found = {**found, **record["run"]}
        return found

    def starts(self) -> list[Record]:
        """Return the records that beginnings and resumptions of the run left."""
        return [record for record in self.records if isinstance(record.get("run"), dict)]

    def points(self, *names: str) -> list[tuple[int, float]]:
        """Return (step, value) of the first of ``names`` that occurs, finite values only."""
        for name in names:
            found = [(r["step"], float(r[name])) for r in self.records if _finite(r.get(name))]
            if found:
                return found
        return []

    def train_records(self) -> list[Record]:
        """Return the records of training steps."""
        return [record for record in self.records if any(name in record for name in LOSS)]

    def evaluations(self) -> list[Record]:
        """Return a record a step with all that was evaluated there."""
        found: dict[int, Record] = {}
        for record in self.records:
            own = {k: v for k, v in record.items() if k.startswith("eval_") and _number(v)}
            if own:
                found.setdefault(record["step"], {"step": record["step"]}).update(own)
        return [found[step] for step in sorted(found)]


def summarise(log: RunLog, now: float | None = None) -> Record:
    """Return what people ask of a run; JSON's types, None where the log does not say."""
    flags, train, evals = log.flags(), log.train_records(), log.evaluations()
    last = {name: value for record in train for name, value in record.items()}
    step = max(record["step"] for record in log.records)
    total = _total(flags)
    losses = log.points(*LOSS)
    quiet = (now or time.time()) - float(log.records[-1].get("time") or 0)
    status = _status(step, total, train, quiet)
    if status == "ended" and any((log.folder / name).exists() for name in RESULTS):
        status = "finished"
    seconds = _seconds_a_step(train)
    return {
        "name": log.name,
        "file": str(log.file),
        "status": status,
        "step": step,
        "total_steps": total,
        "epoch": last.get("epoch"),
        "tokens_seen": last.get("tokens_seen"),
        "seconds": last.get("train_runtime"),
        "seconds_since_last_record": quiet,
        "seconds_to_go": (total - step) * seconds
        if total and seconds and status == "running"
        else None,
        "tokens_per_second": _recent(train, "tokens_per_second"),
        "mfu": _recent(train, "mfu"),
        "peak_memory_gb": last.get("peak_memory_gb"),
        "learning_rate": last.get("train_learning_rate"),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": losses[-1][1] if losses else None,
        "best": _best(evals, flags),
        "evaluations": evals,
        "resumed_at": [record["step"] for record in log.starts() if record["step"]],
        "warnings": _warnings(log, train, status, step, total),
    }


def _total(flags: Record) -> int | None:
    for name in ("total_steps", "max_steps"):
        value = flags.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _status(step: int, total: int | None, train: Sequence[Record], quiet: float) -> str:
    """Return finished, running or stopped; without a known end, whatever is silent has ended."""
    if total is not None and step >= total:
        return "finished"
    times = [float(record["time"]) for record in train[-RECENT:] if _number(record.get("time"))]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    usual = median(gaps) if gaps else 0.0
    if quiet < max(SILENT_SECONDS, SILENT_INTERVALS * usual):
        return "running"
    return "ended" if total is None else "stopped"


def _seconds_a_step(train: Sequence[Record]) -> float | None:
    recent = [r for r in train[-RECENT:] if _number(r.get("train_runtime"))]
    if len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    spent = recent[-1]["train_runtime"] - recent[0]["train_runtime"]
    return max(0.0, spent / (recent[-1]["step"] - recent[0]["step"]))


def _recent(train: Sequence[Record], name: str) -> float | None:
    keys = (name, f"train_{name}")
    found = [record[key] for record in train for key in keys if _finite(record.get(key))]
    return float(median(found[-RECENT:])) if found else None


def _best(evals: Sequence[Record], flags: Record) -> Record | None:
    name = flags.get("metric_for_best_model") or "eval_loss"
    name = name if str(name).startswith("eval_") else f"eval_{name}"
    found = [record for record in evals if _finite(record.get(name))]
    if not found:
        return None
    more = flags.get("greater_is_better")
    if more is None:
        more = not smaller_is_better(name)
    best = (max if more else min)(found, key=lambda record: float(record[name]))
    return {"metric": name, "value": best[name], "step": best["step"]}


def _warnings(
    log: RunLog, train: Sequence[Record], status: str, step: int, total: int | None
) -> list[str]:
    found = []
    bad = [r["step"] for r in train if not any(_finite(r.get(name)) for name in LOSS)]
    if bad:
        found.append(f"the loss was NaN or infinite at step{_listed(bad)}")
    spikes = _spikes(log.points(*LOSS))
    if spikes:
        found.append(f"the loss jumped up at step{_listed(spikes)}")
    if status == "stopped":
        found.append(f"stopped at step {step:,} of {total:,}; the same command goes on from there")
    if log.torn:
        found.append("the last line of the log is not complete (being written, or cut off)")
    return found


def _spikes(points: Sequence[tuple[int, float]]) -> list[int]:
    found = []
    for place in range(SPIKE_WINDOW, len(points)):
        before = median(value for _, value in points[place - SPIKE_WINDOW : place])
        if points[place][1] > before + max(SPIKE_NATS, SPIKE_SHARE * abs(before)):
            found.append(points[place][0])
    return found


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:6])
    more = f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"{'s' if len(steps) > 1 else ''} {shown}{more}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _is_record(name: str, value: Any) -> bool:
    if name == "run":
        return isinstance(value, dict)
    return name == "text" or isinstance(value, int | float) or (value is None and name != "time")


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            try:
                record = errors.parse_json(line)
            except ValueError:  # torn by a crash
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield line, {n: v for n, v in record.items() if _is_record(n, v)}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl`` in file order, without lines torn by a crash."""
    return [record for _, record in _lines(Path(path))]
