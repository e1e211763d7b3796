"""Trackers: TensorBoard, Weights & Biases, JSON lines, and those of plugins.

A tracker never stops training: an error while writing is logged once, and the run continues.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol

from hfseq import plugins
from hfseq.errors import UsageError, redact_private, redact_values
from hfseq.reports.log import read_lines
from hfseq.training.event_file import (
    FAILURE,
    SUCCESS,
    AppendOnlyFile,
    EventFile,
    Histogram,
    remove_events,
    replace_file,
)

logger = logging.getLogger("hfseq.tracking")

METRICS_FILE, WANDB_ID_FILE = "metrics.jsonl", "wandb_run_id"
PACKAGES = {"wandb": "hfseq[wandb]"}


class Tracker(Protocol):
    """A destination for the metrics and texts of a run.

    A tracker can have two more methods. `resume(step)` is called before anything is logged if a run
    continues training from that step. Records of later steps will be logged again. Records of that
    step may be logged again, and the new ones replace the old ones. `histograms(values, step)`
    receives a `hfseq.training.event_file.Histogram` for each tag, for `--log_histograms`.
    """

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Records the metrics of a step."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Records a text sample."""

    def close(self) -> None:
        """Finishes writing."""


class Trackers(list["GuardedTracker"]):
    """All trackers of a run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        for tracker in self:
            tracker.log(dict(metrics), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Records a text sample."""
        for tracker in self:
            tracker.text(tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Records histograms in the trackers that support them."""
        for tracker in self:
            tracker.histograms(values, step)

    def close(self) -> None:
        """Finishes writing."""
        for tracker in self:
            tracker.close()


def tracker_names(report_to: str | Iterable[str] | None) -> list[str]:
    """Returns the names of the trackers in `--report_to`.

    Args:
        report_to: A list of names, "all" (installed ones), or "none".

    Raises:
        UsageError: "all" or "none" is combined with another name.
    """
    values = [report_to] if isinstance(report_to, str) else list(report_to or ["none"])
    words = [name.strip() for part in values for name in part.split(",")]
    names = list(dict.fromkeys(filter(None, words)))
    for word in ("all", "none"):
        if word in names and len(names) > 1:
            other_names = ", ".join(name for name in names if name != word)
            raise UsageError(f"--report_to {word} cannot be combined with {other_names}")
    return [] if names == ["none"] else names


def make_trackers(
    names: str | Iterable[str] | None,
    run_directory: Path,
    arguments: object,
    run_config: Mapping[str, Any],
    resume_step: int | None = None,
) -> Trackers:
    """Opens the trackers of a run.

    Args:
        names: The value of `--report_to`.
        run_directory: The output directory.
        arguments: The training flags.
        run_config: The flags to record. Tokens are removed.
        resume_step: The step from which training continues. Trackers then remove their records of
            later steps; 0 removes those of all training steps. Default: keep all records.

    Raises:
        UsageError: A name is unknown, or a package is missing.
    """
    requested, registry = tracker_names(names), plugins.load().trackers
    config = redact_config(drop_secrets(run_config))
    trackers = Trackers()
    for name in list(registry) if requested == ["all"] else requested:
        factory = registry.get(name)
        try:
            tracker = GuardedTracker(name, partial(factory, run_directory, arguments, config))
        except ImportError as error:
            if requested == ["all"]:
                continue
            package = PACKAGES.get(name, error.name or name)
            raise UsageError(
                f"--report_to {name} requires a package that is not installed: "
                f"pip install '{package}'"
            ) from error
        if resume_step is not None:
            tracker.resume(resume_step)
        trackers.append(tracker)
    return trackers


def drop_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` without entries that are named like tokens or passwords."""
    secret = re.compile(r"(^|_)(token|api_key|password|secret)$")
    return {key: value for key, value in config.items() if not secret.search(key)}


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` without tokens and the home directory in its texts."""
    return redact_values(dict(config), redact_private)


class GuardedTracker:
    """A tracker that logs a single warning, instead of raising, if it cannot write.

    If opening fails for an operating system error, it is tried again for each record. After any
    other error, except a missing package, the tracker stays closed.

    Args:
        name: The name of the tracker.
        make: Opens the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self._make: Callable[[], Tracker] | None = make
        self._tracker: Tracker | None = None
        self._warned = False
        self._resume_at: int | None = None
        self._call("")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Records the metrics of a step, if possible."""
        self._call("log", metrics, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Records a text sample, if possible."""
        self._call("text", tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Records histograms, if the tracker supports them."""
        self._call("histograms", values, step)

    def resume(self, step: int) -> None:
        """Removes later steps, if the tracker supports it. Retried before the next record."""
        self._resume_at = step
        self._call("")

    def close(self) -> None:
        """Finishes writing."""
        if self._tracker is not None:
            self._call("close")

    def _call(self, name: str, *args: Any) -> None:
        """Opens and resumes the tracker if necessary, then calls a method if it exists."""
        try:
            if self._tracker is None and self._make is not None:
                try:
                    self._tracker = self._make()
                except (OSError, ImportError, UsageError):
                    raise
                except Exception:
                    self._make = None  # a login or a connection can take minutes to fail
                    raise
            if self._tracker is None:
                return
            if (step := self._resume_at) is not None and name != "close":
                self._resume_at = None
                try:
                    getattr(self._tracker, "resume", lambda step: None)(step)
                except OSError:
                    self._resume_at = step
                    raise
            if method := getattr(self._tracker, name or "_", None):
                method(*args)
        except (ImportError, UsageError):
            raise
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "tracker '%s' cannot write (%s: %s). Training continues without its records",
                    *(self.name, type(error).__name__, error),
                )


class JsonlTracker:
    """Writes `metrics.jsonl`, with one object per line: step, time and metrics.

    Each line is complete or absent. When a run starts or resumes training, a line contains its
    configuration under `run`. Records that a resumed run repeats for its first step replace the old
    ones.
    """

    def __init__(
        self,
        run_directory: Path,
        arguments: object = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(run_directory) / METRICS_FILE
        self._config = _set_values(run_config)
        self._resumed_at, self._num_old_lines = -1, 0  # -1: not resumed
        self._file = self._open()

    def _open(self) -> AppendOnlyFile:
        file = AppendOnlyFile(self.path)
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):  # a killed run or a full disk: drop the incomplete line
            os.truncate(self.path, content.rfind(b"\n") + 1)
        return file

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Appends a line. NaN and infinity, which JSON does not support, become null."""
        numbers = {
            name: value if isinstance(value, int) else float(value)
            for name, value in metrics.items()
        }
        self._write(step, {k: v if math.isfinite(v) else None for k, v in numbers.items()})

    def text(self, tag: str, text: str, step: int) -> None:
        """Appends a line with `{"text": {tag: text}}`."""
        self._write(step, {"text": {tag: text}})

    def resume(self, step: int) -> None:
        """Removes the lines of later steps, by replacing the file."""
        lines = [line for line, record in read_lines(self.path) if record["step"] <= step]
        self._rewrite(lines)
        self._resumed_at, self._num_old_lines = step, len(lines)
        if self._config:
            self._write(step, {"run": self._config})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        self._file.close()
        try:
            replace_file(self.path, lines)
        finally:
            self._file = self._open()

    def _forget(self, names: set[str]) -> None:
        """Removes old lines about the same metrics or tags at the resumed step."""
        lines = list(read_lines(self.path))
        remaining = [
            line
            for line, record in lines[: self._num_old_lines]
            if record["step"] != self._resumed_at or names.isdisjoint(_names(record))
        ]
        if len(remaining) < self._num_old_lines:
            self._rewrite([*remaining, *(line for line, _ in lines[self._num_old_lines :])])
            self._num_old_lines = len(remaining)

    def _write(self, step: int, record: dict[str, Any]) -> None:
        if step == self._resumed_at:
            self._forget(_names(record))
        line = {"step": int(step), "time": round(time.time(), 3), **record}
        text = json.dumps(line, allow_nan=False, ensure_ascii=False, default=str)
        self._file.append(text.encode() + b"\n")


def _names(record: Mapping[str, Any]) -> set[str]:
    """Returns the metrics of a line, or the tags of its texts."""
    texts = record.get("text")
    tags = {f"text/{tag}" for tag in texts} if isinstance(texts, dict) else set()
    return tags | (record.keys() - {"step", "time", "text", "run"})


def _set_values(run_config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: v for name, v in (run_config or {}).items() if v not in (None, [])}


class TensorBoardTracker:
    """Writes event files in `<run_directory>/runs/<date_host>/`, which the Hub displays, too."""

    def __init__(
        self,
        run_directory: Path,
        arguments: object = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.runs = Path(run_directory) / "runs"
        self._config = _set_values(run_config)
        self._host = re.sub(r"[^\w.-]", "-", socket.gethostname())
        self._file: EventFile | None = None
        self._resumed_at, self._old_files = -1, list[Path]()  # -1: not resumed

    def _open(self, directory: Path | None = None) -> EventFile:
        if self._file is None:
            directory = directory or self.runs / f"{time.strftime('%b%d_%H-%M-%S')}_{self._host}"
            self._file = EventFile(directory, self._host)
            if self._config:
                self._file.hyperparameters(self._config)
        return self._file

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Adds one point to the curve of each metric."""
        self._forget(metrics, step)
        self._open().scalars({name: float(value) for name, value in metrics.items()}, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Adds a text sample, shown as Markdown."""
        self._forget([f"{tag}/text_summary"], step)
        self._open().text(tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Adds a histogram for each tag."""
        self._open().histograms(values, step)

    def resume(self, step: int) -> None:
        """Continues in the latest directory, so that curves are continuous."""
        directories = [path.parent for path in self.runs.glob("*/*tfevents*")]
        if directories and step > 0:
            newest = max(directories, key=lambda path: path.stat().st_mtime)
            self._resumed_at, self._old_files = step, sorted(newest.glob("*tfevents*"))
            self._open(newest).start_session(step + 1)

    def _forget(self, tags: Iterable[str], step: int) -> None:
        """Removes old events with these tags at the resumed step."""
        if step == self._resumed_at:
            for path in self._old_files:
                remove_events(path, step, tags)

    def close(self) -> None:
        """Records how the run ended, and closes the event file."""
        if self._file is None:
            return
        try:
            if self._config:  # also called while an exception propagates
                self._file.end_session(FAILURE if sys.exc_info()[0] else SUCCESS)
        finally:
            self._file.close()


class WandbTracker:
    """A Weights & Biases run, which is resumed if the directory contains its ID (`wandb_run_id`).

    The project is WANDB_PROJECT or "hfseq". All other WANDB_* variables work as documented by W&B.
    """

    def __init__(
        self, run_directory: Path, arguments: object, run_config: Mapping[str, Any]
    ) -> None:
        import wandb

        id_file = Path(run_directory) / WANDB_ID_FILE
        saved_id = id_file.read_text().strip() if id_file.exists() else ""
        run_id = saved_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "hfseq",
            name=getattr(arguments, "run_name", None)
            or os.environ.get("WANDB_NAME")
            or Path(run_directory).resolve().name,
            id=run_id,
            resume="allow",
            dir=str(run_directory),
            config=dict(run_config),
        )
        id_file.write_text(run_id + "\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs the metrics. W&B ignores steps that it already has (from before a kill)."""
        self.run.log(dict(metrics), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Logs a text sample as preformatted text."""
        self.run.log({tag: self._wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Logs a histogram for each tag."""
        import numpy as np

        wandb_histograms = {
            tag: self._wandb.Histogram(
                np_histogram=(np.asarray(histogram.counts), np.asarray(histogram.edges))
            )
            for tag, histogram in values.items()
        }
        self.run.log(wandb_histograms, step=step)

    def close(self) -> None:
        """Finishes the run."""
        self.run.finish()
