"""Trackers, which record the metrics of a run: TensorBoard, Weights & Biases and JSON lines.

Plugins can add further trackers. An error in a tracker does not stop training. The first error is
logged, and the run continues.
"""

from __future__ import annotations

import importlib.util
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
from hfseq.errors import UsageError, import_problem, redact_private, redact_values
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

    A tracker can have two optional methods:

    - `resume(step)` is called before anything is logged if the run resumes training from `step`.
      The tracker should remove its records of later steps, which will be logged again. Records of
      `step` itself may be logged again, and should then replace the old ones.
    - `histograms(values, step)` records the histograms of `--log_histograms`. `values` contains a
      `hfseq.training.event_file.Histogram` for each tag.
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
        report_to: Names of trackers, "all" for all trackers whose packages are installed, or
            "none".

    Raises:
        UsageError: "all" or "none" is combined with another name.
    """
    values = [report_to] if isinstance(report_to, str) else list(report_to or ["none"])
    words = [name.strip() for part in values for name in part.split(",")]
    names = list(dict.fromkeys(filter(None, words)))
    for word in ("all", "none"):
        if word in names and len(names) > 1:
            other_names = ", ".join(name for name in names if name != word)
            raise UsageError(f"--report_to: the value {word} cannot be combined with {other_names}")
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
        run_config: The flags to record. Access tokens are removed.
        resume_step: The step from which training resumes. Trackers then remove their records of
            later steps, or of all training steps if it is 0. Default: keep all records.

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
            package = name if name in PACKAGES else error.name or name
            problem = import_problem(error, package, PACKAGES.get(name, package))
            if requested != ["all"]:
                raise UsageError(f"`--report_to {name}` {problem}") from error
            if importlib.util.find_spec(package) is not None:
                logger.warning("`--report_to all` omits the tracker %s: it %s", name, problem)
            continue
        if resume_step is not None:
            tracker.resume(resume_step)
        trackers.append(tracker)
    return trackers


def drop_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` without entries whose name indicates an access token or password."""
    secret = re.compile(r"(^|_)(token|api_key|password|secret)$")
    return {key: value for key, value in config.items() if not secret.search(key)}


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` without access tokens and the home directory in its strings."""
    return redact_values(dict(config), redact_private)


class GuardedTracker:
    """Wraps a tracker, and logs a warning instead of raising if the tracker cannot write.

    Only the first error is logged. If opening the tracker fails with an error of the operating
    system, every later call tries to open it again. Missing packages and usage errors are raised.
    After any other error while opening, the tracker remains closed.

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
        """Removes the records of later steps, if the tracker supports this.

        If this fails with an error of the operating system, it is tried again before the next
        record.
        """
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
                    self._make = None  # retrying a login or a connection can take minutes
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
    """Writes `metrics.jsonl`. Each line is a JSON object with the step, the time and the metrics.

    No line is written partially. When a run starts or resumes training, it writes a line with its
    flags under the key `run`. A resumed run may log the step from which it resumes again. The new
    records then replace the old ones.
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
        if not content.endswith(b"\n"):  # drop a line that a killed run left incomplete
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
        """Removes the lines of later steps. The file is replaced atomically."""
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
        """Removes the old lines of the resumed step that contain any of these metrics or tags."""
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
    """Returns the names of the metrics of a line, or the tags of its texts."""
    texts = record.get("text")
    tags = {f"text/{tag}" for tag in texts} if isinstance(texts, dict) else set()
    return tags | (record.keys() - {"step", "time", "text", "run"})


def _set_values(run_config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: v for name, v in (run_config or {}).items() if v not in (None, [])}


class TensorBoardTracker:
    """Writes TensorBoard event files in `<run_directory>/runs/<date_host>/`.

    The Hub displays these files, too.
    """

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
        """Directs further events to the latest directory, so that its curves continue."""
        directories = [path.parent for path in self.runs.glob("*/*tfevents*")]
        if directories and step > 0:
            newest = max(directories, key=lambda path: path.stat().st_mtime)
            self._resumed_at, self._old_files = step, sorted(newest.glob("*tfevents*"))
            self._open(newest).start_session(step + 1)

    def _forget(self, tags: Iterable[str], step: int) -> None:
        """Removes the old events of the resumed step that have these tags."""
        if step == self._resumed_at:
            for path in self._old_files:
                remove_events(path, step, tags)

    def close(self) -> None:
        """Records how the run ended, and closes the event file."""
        if self._file is None:
            return
        try:
            if self._config:  # `close` is also called while an exception propagates
                self._file.end_session(FAILURE if sys.exc_info()[0] else SUCCESS)
        finally:
            self._file.close()


class WandbTracker:
    """Logs to a Weights & Biases run, whose ID is stored in `wandb_run_id` to resume it later.

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
        """Logs the metrics.

        After a resume, W&B ignores the steps that it received before the run was interrupted.
        """
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
        """Finishes the W&B run."""
        self.run.finish()
