"""Where the numbers of a run go: TensorBoard, Weights & Biases, JSON lines, and plugins' sinks.

A tracker never stops training: what goes wrong while it writes is logged once and the run goes on.
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
    """A sink for the metrics and text samples of one run.

    A tracker may also have ``resume(step)``, called before anything is logged when a run trains
    from that step on: what it holds of later steps will be logged again, and so may be what it
    holds of that step, which the new then replaces; and ``histograms(values, step)``, for
    ``--log_histograms``, with a :class:`~hfseq.training.event_file.Histogram` for each tag.
    """

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text sample."""

    def close(self) -> None:
        """Finish writing."""


class Trackers(list["GuardedTracker"]):
    """All trackers of a run, as one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        for tracker in self:
            tracker.log(dict(metrics), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text sample."""
        for tracker in self:
            tracker.text(tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Record histograms, where a tracker can."""
        for tracker in self:
            tracker.histograms(values, step)

    def close(self) -> None:
        """Finish writing."""
        for tracker in self:
            tracker.close()


def tracker_names(report_to: str | Iterable[str] | None) -> list[str]:
    """Return the trackers that ``--report_to`` names: a list, "all" (as installed) or "none"."""
    given = [report_to] if isinstance(report_to, str) else list(report_to or ["none"])
    words = [name.strip() for part in given for name in part.split(",")]
    names = list(dict.fromkeys(filter(None, words)))
    for word in ("all", "none"):
        if word in names and len(names) > 1:
            others = ", ".join(name for name in names if name != word)
            raise UsageError(f"--report_to {word} cannot be combined with {others}")
    return [] if names == ["none"] else names


def make_trackers(
    names: str | Iterable[str] | None,
    run_directory: Path,
    arguments: object,
    run_config: Mapping[str, Any],
    resume_step: int | None = None,
) -> Trackers:
    """Open the trackers of a run.

    With ``resume_step`` they forget what they hold of later steps (0: of any training step);
    without it they add to what is there. Unknown names and missing packages raise UsageError.
    """
    wanted, registry = tracker_names(names), plugins.load().trackers
    config = redact_config(drop_secrets(run_config))
    trackers = Trackers()
    for name in list(registry) if wanted == ["all"] else wanted:
        factory = registry.get(name)
        try:
            tracker = GuardedTracker(name, partial(factory, run_directory, arguments, config))
        except ImportError as error:
            if wanted == ["all"]:
                continue
            package = PACKAGES.get(name, error.name or name)
            raise UsageError(
                f"--report_to {name} needs a package that is not installed: pip install '{package}'"
            ) from error
        if resume_step is not None:
            tracker.resume(resume_step)
        trackers.append(tracker)
    return trackers


def drop_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without entries whose name says that they are tokens or passwords."""
    secret = re.compile(r"(^|_)(token|api_key|password|secret)$")
    return {key: value for key, value in config.items() if not secret.search(key)}


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without tokens in its texts and without the name of the user's home."""
    return redact_values(dict(config), redact_private)


class GuardedTracker:
    """A tracker that warns once, instead of raising, when it cannot write.

    ``make`` opens the tracker. Where that fails for lack of room or rights it is tried again with
    each record; after any other failure but a missing package the tracker stays silent.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self._make: Callable[[], Tracker] | None = make
        self._tracker: Tracker | None = None
        self._warned = False
        self._resume_at: int | None = None
        self._call("")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of a step, if that is possible."""
        self._call("log", metrics, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text sample, if that is possible."""
        self._call("text", tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Record histograms, where the tracker can."""
        self._call("histograms", values, step)

    def resume(self, step: int) -> None:
        """Forget later steps, where the tracker can; before the next record if not now."""
        self._resume_at = step
        self._call("")

    def close(self) -> None:
        """Finish writing."""
        if self._tracker is not None:
            self._call("close")

    def _call(self, name: str, *given: Any) -> None:
        """Open and resume where that is still to be done, then call the method, if there is one."""
        try:
            if self._tracker is None and self._make is not None:
                try:
                    self._tracker = self._make()
                except (OSError, ImportError, UsageError):
                    raise
                except Exception:
                    self._make = None  # an account or a network may take minutes to fail, each time
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
                method(*given)
        except (ImportError, UsageError):
            raise
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "tracker '%s' cannot write (%s: %s); training goes on without its records",
                    *(self.name, type(error).__name__, error),
                )


class JsonlTracker:
    """``metrics.jsonl``: a line is one object with step, time and metrics, and whole or absent.

    Where a run begins to train, or goes on, the line has its configuration under ``run``. What a
    resumed run repeats of the step that it goes on from replaces what the log has of it.
    """

    def __init__(
        self,
        run_directory: Path,
        arguments: object = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(run_directory) / METRICS_FILE
        self._config = _given(run_config)
        self._resumed_at, self._before = -1, 0  # a step, and the lines from before
        self._file = self._open()

    def _open(self) -> AppendOnlyFile:
        file = AppendOnlyFile(self.path)
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):  # a killed run, or a full disk: drop the torn line
            os.truncate(self.path, content.rfind(b"\n") + 1)
        return file

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Append one line; NaN and infinities, which JSON lacks, become null."""
        numbers = {
            name: value if isinstance(value, int) else float(value)
            for name, value in metrics.items()
        }
        self._write(step, {k: v if math.isfinite(v) else None for k, v in numbers.items()})

    def text(self, tag: str, text: str, step: int) -> None:
        """Append a line with ``{"text": {tag: text}}``."""
        self._write(step, {"text": {tag: text}})

    def resume(self, step: int) -> None:
        """Drop the lines of later steps, replacing the file as a whole."""
        kept = [line for line, record in read_lines(self.path) if record["step"] <= step]
        self._rewrite(kept)
        self._resumed_at, self._before = step, len(kept)
        if self._config:
            self._write(step, {"run": self._config})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        self._file.close()
        try:
            replace_file(self.path, lines)
        finally:
            self._file = self._open()

    def _forget(self, names: set[str]) -> None:
        """Drop the lines from before that say the same of the step from which the run goes on."""
        lines = list(read_lines(self.path))
        kept = [
            line
            for line, record in lines[: self._before]
            if record["step"] != self._resumed_at or names.isdisjoint(_names(record))
        ]
        if len(kept) < self._before:
            self._rewrite([*kept, *(line for line, _ in lines[self._before :])])
            self._before = len(kept)

    def _write(self, step: int, record: dict[str, Any]) -> None:
        if step == self._resumed_at:
            self._forget(_names(record))
        line = {"step": int(step), "time": round(time.time(), 3), **record}
        text = json.dumps(line, allow_nan=False, ensure_ascii=False, default=str)
        self._file.append(text.encode() + b"\n")


def _names(record: Mapping[str, Any]) -> set[str]:
    """Return what a line is about: its metrics, or the tags of its texts."""
    texts = record.get("text")
    tags = {f"text/{tag}" for tag in texts} if isinstance(texts, dict) else set()
    return tags | (record.keys() - {"step", "time", "text", "run"})


def _given(run_config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: v for name, v in (run_config or {}).items() if v not in (None, [])}


class TensorBoardTracker:
    """Event files under ``<run_directory>/runs/<date_host>/``, whose curves the Hub shows too."""

    def __init__(
        self,
        run_directory: Path,
        arguments: object = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.runs = Path(run_directory) / "runs"
        self._config = _given(run_config)
        self._host = re.sub(r"[^\w.-]", "-", socket.gethostname())
        self._file: EventFile | None = None
        self._resumed_at, self._before = -1, list[Path]()  # a step, and the files from before

    def _open(self, directory: Path | None = None) -> EventFile:
        if self._file is None:
            directory = directory or self.runs / f"{time.strftime('%b%d_%H-%M-%S')}_{self._host}"
            self._file = EventFile(directory, self._host)
            if self._config:
                self._file.hyperparameters(self._config)
        return self._file

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Add one point to the curve of each metric."""
        self._forget(metrics, step)
        self._open().scalars({name: float(value) for name, value in metrics.items()}, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Add a text sample, shown as Markdown."""
        self._forget([f"{tag}/text_summary"], step)
        self._open().text(tag, text, step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Add a histogram for each tag."""
        self._open().histograms(values, step)

    def resume(self, step: int) -> None:
        """Go on in the newest directory, so that the curves stay in one piece."""
        directories = [path.parent for path in self.runs.glob("*/*tfevents*")]
        if directories and step > 0:
            newest = max(directories, key=lambda path: path.stat().st_mtime)
            self._resumed_at, self._before = step, sorted(newest.glob("*tfevents*"))
            self._open(newest).start_session(step + 1)

    def _forget(self, tags: Iterable[str], step: int) -> None:
        """Drop what files from before say of these tags at the step the run goes on from."""
        if step == self._resumed_at:
            for path in self._before:
                remove_events(path, step, tags)

    def close(self) -> None:
        """Say how the run ended, and close the event file."""
        if self._file is None:
            return
        try:
            if self._config:  # called while an error is on its way, too
                self._file.end_session(FAILURE if sys.exc_info()[0] else SUCCESS)
        finally:
            self._file.close()


class WandbTracker:
    """A Weights & Biases run, resumed if the directory has one (``wandb_run_id``).

    The project is WANDB_PROJECT or "hfseq"; the other WANDB_* variables work as W&B documents them.
    """

    def __init__(
        self, run_directory: Path, arguments: object, run_config: Mapping[str, Any]
    ) -> None:
        import wandb

        id_file = Path(run_directory) / WANDB_ID_FILE
        known = id_file.read_text().strip() if id_file.exists() else ""
        run_id = known or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
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
        """Log the metrics; steps that W&B has already (before a kill) are left as they are."""
        self.run.log(dict(metrics), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Log a text sample as preformatted text."""
        self.run.log({tag: self._wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Log a histogram for each tag."""
        import numpy as np

        made = {
            tag: self._wandb.Histogram(np_histogram=(np.asarray(one.counts), np.asarray(one.edges)))
            for tag, one in values.items()
        }
        self.run.log(made, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()
