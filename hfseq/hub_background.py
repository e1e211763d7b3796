"""Pushing while training goes on: a thread, and a snapshot of the folder for each save."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from hfseq.errors import HfseqError
from hfseq.hub import DEFAULT_IGNORE, files_to_push, push_folder
from hfseq.hub_retry import one_line, redact

logger = logging.getLogger("hfseq.hub")

SNAPSHOTS = Path(".cache", "push")
APPENDED_IN_PLACE = ("*tfevents*", "*.jsonl", "*.log")
LINK_ABOVE = 8_000_000


class BackgroundPusher:
    """Pushes the saves of a training run to the Hub from a thread, one commit a save.

    ``push`` takes a snapshot of the folder (hard links for weights, copies for the rest, within
    ``<folder>/.cache``) and returns; the run may go on writing. While an upload is under way only
    the newest snapshot waits. A failed push is logged and made good by the next one, or by
    ``finish``. Nothing here raises into the training loop. ``checkpoint`` is as for `push_folder`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        repo_id: str,
        private: bool = False,
        token: str | None = None,
        ignore_patterns: Sequence[str] | None = None,
        revision: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        self.folder, self.repo_id, self.private = Path(folder), repo_id, private
        self.checkpoint = checkpoint
        self.ignore = DEFAULT_IGNORE if ignore_patterns is None else tuple(ignore_patterns)
        self.revision, self.commit_url = revision, ""
        self._token = token
        self._error: str | None = None
        self._message = ""
        self._count = 0
        self._waiting: tuple[Path, str] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        shutil.rmtree(self.folder / SNAPSHOTS, ignore_errors=True)  # left by a killed run

    def push(self, message: str) -> None:
        """Push the folder as it is now; returns at once."""
        self._message = message
        try:
            snapshot = self._snapshot()
        except (OSError, HfseqError) as error:
            self._failed(f"cannot take a snapshot of {self.folder}: {one_line(error)}")
            return
        with self._lock:
            if self._waiting:
                shutil.rmtree(self._waiting[0], ignore_errors=True)
            self._waiting = (snapshot, message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
                self._thread.start()

    def finish(self, timeout: float | None = None) -> str | None:
        """Wait for the pushes, repeat a failed last one; return None or what is left to do."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._join(deadline) and self._error:
            self.push(self._message)
            self._join(deadline)
        if self._thread is not None:
            self._error = f"still under way after {timeout:.0f} s"
        if self._error is None:
            shutil.rmtree(self.folder / SNAPSHOTS, ignore_errors=True)
            return None
        return f"the push to '{self.repo_id}' is not complete: {self._error}. {self._remedy()}"

    def _remedy(self) -> str:
        words = ["hfseq", "push", str(self.folder), "--hub_model_id", self.repo_id]
        words += ["--hub_private_repo"] * self.private + ["--checkpoint"] * self.checkpoint
        return f"Finish it with: {shlex.join(words)}"

    def _join(self, deadline: float | None) -> bool:
        if thread := self._thread:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._thread is None

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                (snapshot, message), self._waiting = self._waiting, None
            self._push_one(snapshot, message)
            shutil.rmtree(snapshot, ignore_errors=True)

    def _push_one(self, snapshot: Path, message: str) -> None:
        try:
            self.commit_url = push_folder(
                snapshot,
                self.repo_id,
                private=self.private,
                token=self._token,
                message=message,
                revision=self.revision,
                ignore_patterns=None,
                checkpoint=self.checkpoint,
            )
            self._error = None
        except Exception as error:  # a thread that dies silently would lose every later push
            text = redact(one_line(error), self._token)
            self._failed(text.replace(str(snapshot), str(self.folder)))

    def _failed(self, reason: str) -> None:
        self._error = reason
        logger.warning("push to the Hub failed (training goes on, next save retries): %s", reason)

    def _snapshot(self) -> Path:
        self._count += 1
        snapshot = self.folder / SNAPSHOTS / f"{os.getpid()}-{self._count}"
        snapshot.mkdir(parents=True)
        for name, path in files_to_push(self.folder, None, self.ignore, self.checkpoint):
            target = snapshot / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, target)
        return snapshot


def _link_or_copy(source: Path, target: Path) -> None:
    # A link keeps the old content when the file is replaced by renaming, as weights are; a file
    # that is appended to would change under the upload.
    appended = any(fnmatch(source.name, pattern) for pattern in APPENDED_IN_PLACE)
    if not appended and source.stat().st_size > LINK_ABOVE:
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without hard links
            pass
    shutil.copy2(source, target)
