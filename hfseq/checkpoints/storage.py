"""Validates output directories, and keeps local copies of remote ones (fsspec URLs)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hfseq.checkpoints import network
from hfseq.errors import (
    CheckpointError,
    UsageError,
    atomic_replace,
    import_problem,
    one_line,
    parse_json,
    write_atomically,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("hfseq.checkpoints.storage")

#: The file at the URL that lists the complete checkpoints, and the file in the local copy that
#: stores the state of the synchronization.
LATEST_FILE, SYNC_FILE = "latest.json", ".hfseq-sync.json"
#: Package with the fsspec file system of each URL protocol.
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
CHECKPOINT_PATH = re.compile(r"(checkpoints/|checkpoint-)\d+(/|$)")
UNSYNCED_FILES = (
    *("*.tmp", "*.tmp-*", "*.orbax-checkpoint-tmp*", ".cache/*", "wandb/*", "*.lock"),
    *(LATEST_FILE, SYNC_FILE, ".hfseq-going-back"),
)

# File name patterns that are allowed in an output directory.
WEIGHT_FILES = (
    *("model*.safetensors*", "flax_model*.msgpack*", "pytorch_model*.bin*"),
    *("fp8_params.safetensors", "adapter_config.json", "adapter_model.safetensors"),
)
CHECKPOINTS = ("checkpoints", "checkpoint-*")
LOG_FILES = (
    *("runs", "wandb", "wandb_run_id", "metrics.jsonl", "profile", "logs", "plots", "*.png"),
    *("*_results.json", "trainer_state.json", "training_args*", "training_arguments*", "run.json"),
    *("generated_*.txt", "test_results*.tsv", "predictions.*", "nbest_predictions.json"),
    *("null_odds.json", "reference_logps"),
)
PREPARED_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*chat_template*", "spm_char*", "*.py"),
    *("preprocessor_config.json", "README*", "MODEL_CARD.md", "LICEN[SC]E*", "CITATION*"),
    *("NOTICE*", "modules.json", "*sentence_*.json", "[0-9]_*"),
    *("router_config.json", "query_[0-9]_*", "document_[0-9]_*"),
    *(".*", "__pycache__", "previous-*", "*.tmp*", "*.log", "*.out", "*.err", "*.yaml", "*.yml"),
)
RUN_FILES = (*WEIGHT_FILES, *CHECKPOINTS, *LOG_FILES, *PREPARED_FILES)


class Workspace:
    """Provides the output directory of a run as a local path.

    A local directory is used directly. For a URL such as "gs://bucket/run", the workspace keeps a
    local copy of the remote directory. Call ``pull`` before the run and ``push`` after each save.

    A remote checkpoint is complete when ``latest.json`` at the URL lists it. ``push`` writes that
    file last, so that an interrupted push does not change the previous state.

    Args:
        output_dir: Local directory or URL.
        scratch: Directory of the local copy. Default: a directory in ``HFSEQ_CACHE``, or in
            ~/.cache/hfseq if that variable is not set.

    Attributes:
        url: ``output_dir`` as a string.
        is_remote: Whether ``output_dir`` is a URL.
        path: The local directory.

    Raises:
        UsageError: The protocol of the URL is unknown or its package is not installed.
    """

    def __init__(self, output_dir: str | os.PathLike[str], scratch: Path | None = None) -> None:
        self.url = os.fspath(output_dir)
        protocol, separator, remote_path = self.url.partition("://")
        self.is_remote = bool(separator) and protocol not in ("file", "local")
        if not self.is_remote:
            self.path = Path(remote_path if separator else self.url)
            return
        import fsspec

        self._fs: AbstractFileSystem
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            package = PACKAGES.get(protocol, error.name or protocol)
            problem = import_problem(error, package, package)
            raise UsageError(f"--output_dir {protocol}://... {problem}") from error
        except ValueError as error:
            raise UsageError(
                f"--output_dir: unknown protocol '{protocol}://'. Use a local directory, gs://, "
                "s3:// or another file system of fsspec"
            ) from error
        self._root = root.rstrip("/")
        cache = Path(os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq").expanduser()
        name = re.sub(r"[^\w.-]", "-", self.url.rstrip("/").rpartition("/")[2]) or "run"
        digest = hashlib.sha256(self.url.rstrip("/").encode()).hexdigest()[:12]
        self.path = scratch or cache / "workspaces" / f"{name}-{digest}"
        # State after the last synchronization: the ID of the remote state, and the size and
        # modification time of each local file.
        try:
            sync = parse_json((self.path / SYNC_FILE).read_bytes())
        except (OSError, ValueError):
            sync = {}
        sync = sync if isinstance(sync, dict) else {}
        self._id: str | None = sync.get("id")
        self._synced = {name: tuple(stamp) for name, stamp in sync.get("files", {}).items()}

    def pull(self) -> None:
        """Updates the local copy. Files that were saved but not pushed yet are kept.

        The remote state may have changed since the last synchronization, because another machine
        has pushed or because the remote files were deleted. The remote state then takes
        precedence, and checkpoints that only exist locally are moved to ``previous-<time>/``.

        Raises:
            CheckpointError: The storage cannot be read.
        """
        if not self.is_remote:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            network.run_with_stall_timeout(self._pull)
        except Exception as error:  # each backend raises its own types of errors
            stalled = isinstance(error, network.TransferStalled)
            reason = f"{error}. Run the same command to resume" if stalled else _reason(error)
            raise CheckpointError(f"cannot read {self._shown}: {reason}") from error

    def _pull(self) -> None:
        remote, latest = self._remote_files(), {}
        if self._fs.exists(self._remote(LATEST_FILE)):
            latest = parse_json(self._fs.cat_file(self._remote(LATEST_FILE)))
        complete = latest.get("files", {})
        changed = latest.get("id") != self._id
        if changed and latest:
            local_checkpoints = {_checkpoint(name) for name, _ in self._local_files()} - {""}
            local_only = local_checkpoints - {_checkpoint(name) for name in complete}
            move_aside(self.path, [self.path / name for name in sorted(local_only)])
        elif changed:
            move_aside(self.path, _old_files(self.path))
            self._synced.clear()
        for name, size in self._wanted(remote, complete):
            local = self.path / name
            if not local.exists() or (changed and not CHECKPOINT_PATH.match(name)):
                self._download(name, size)
                self._synced[name] = _stamp(local)
        self._remember(latest.get("id"))

    def push(self, strict: bool = False, timeout: float | None = None) -> bool:
        """Uploads new and changed files.

        Args:
            strict: Whether to raise an error if the upload fails. Otherwise the failure is logged
                as a warning, and the next push uploads the files.
            timeout: Seconds without network traffic after which the upload fails. Default:
                ``--hub_timeout``.

        Returns:
            Whether the upload has succeeded.

        Raises:
            CheckpointError: The upload has failed and ``strict`` is set.
        """
        if not self.is_remote:
            return True
        try:
            network.run_with_stall_timeout(self._push, timeout)
            return True
        except Exception as error:  # each backend raises its own types of errors
            message = self.incomplete_message(
                str(error) if isinstance(error, network.TransferStalled) else _reason(error)
            )
            if strict:
                raise CheckpointError(
                    f"{message}. Run the same command on this machine to resume"
                ) from error
            logger.warning("%s; the next save retries", message)
            return False

    def incomplete_message(self, reason: str) -> str:
        """Returns a message with the reason for an incomplete upload and the local directory."""
        return f"cannot write {self._shown} ({reason}). All files are kept in {self.path}"

    def _push(self) -> None:
        local = dict(self._local_files())
        # Upload checkpoints first, so that newer logs and weights never lack their checkpoint.
        for name in sorted(local, key=lambda name: not CHECKPOINT_PATH.match(name)):
            if self._synced.get(name) != local[name]:
                _check_not_abandoned()
                self._fs.put_file(str(self.path / name), self._remote(name))
                self._synced[name] = local[name]
        checkpoints = {
            name: size for name, (size, _) in local.items() if CHECKPOINT_PATH.match(name)
        }
        state = uuid.uuid4().hex
        latest = json.dumps({"id": state, "files": checkpoints})
        _check_not_abandoned()
        self._fs.pipe_file(self._remote(LATEST_FILE), latest.encode())
        self._remember(state)
        for name in self._remote_files():
            managed = CHECKPOINT_PATH.match(name) or name in self._synced
            if managed and name not in local and not name.startswith("previous-"):
                _check_not_abandoned()
                self._fs.rm_file(self._remote(name))
                self._synced.pop(name, None)

    def _remember(self, remote_id: str | None) -> None:
        self._id = remote_id
        write_atomically(
            self.path / SYNC_FILE, json.dumps({"id": remote_id, "files": self._synced})
        )

    @property
    def _shown(self) -> str:
        return re.sub(r"://[^/@]*@", "://", self.url)  # without credentials

    def _remote(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remote_files(self) -> dict[str, int]:
        """Returns the size of each remote file by its name relative to the root."""
        self._fs.invalidate_cache()
        prefix = len(self._root.rstrip("/")) + 1
        entries = self._fs.find(self._root, detail=True)
        return {path[prefix:]: int(info["size"] or 0) for path, info in entries.items()}

    def _local_files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and not _skipped(name):
                yield name, _stamp(path)

    def _wanted(self, remote: dict[str, int], complete: dict[str, int]) -> list[tuple[str, int]]:
        """Returns name and size of the remote files to download, except incomplete checkpoints."""
        damaged = {_checkpoint(n) for n, size in complete.items() if remote.get(n) != size}
        for name in sorted(damaged):
            logger.warning("ignoring the incomplete checkpoint %s/%s", self._shown, name)
        return [
            (name, size)
            for name, size in remote.items()
            if not _skipped(name)
            and not name.startswith("previous-")
            and (not CHECKPOINT_PATH.match(name) or name in complete)
            and _checkpoint(name) not in damaged
        ]

    def _download(self, name: str, size: int) -> None:
        target = self.path / name
        if ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"the name '{name}' points outside the directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(target) as temporary:
            self._fs.get_file(self._remote(name), str(temporary))
            if temporary.stat().st_size != size:
                raise OSError(f"{name} has {temporary.stat().st_size} bytes instead of {size}")


def _check_not_abandoned() -> None:
    """Stops an upload that continues after it was abandoned: a newer upload may be running."""
    if network.is_abandoned():
        raise CheckpointError("the upload was abandoned")


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _skipped(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in UNSYNCED_FILES)


def _checkpoint(name: str) -> str:
    match = CHECKPOINT_PATH.match(name)
    return match[0].rstrip("/") if match else ""


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def check_output_dir(
    path: Path, overwrite: bool = False, allowed: Iterable[str] = RUN_FILES
) -> None:
    """Checks that a directory can be the output directory of a run.

    The directory may contain a config, a tokenizer, and the files of an earlier run. That run is
    then resumed from its checkpoints.

    Args:
        path: The directory.
        overwrite: Whether to move old weights, checkpoints and logs to ``previous-<time>/`` in the
            directory. Nothing is deleted.
        allowed: Patterns of the files that the directory may contain.

    Raises:
        UsageError: The directory contains other files, or links to files outside of the directory.
            The error is also raised for weights without a checkpoint to resume from, because
            training would replace these weights.
    """
    path, patterns = Path(path), tuple(allowed)
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"--output_dir {path} is a file: use a directory")
    foreign = sorted(p.name for p in path.iterdir() if not matches_any(p, patterns))
    if foreign:
        listed = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" * (len(foreign) > 5))
        raise UsageError(
            f"--output_dir {path} contains unrelated files ({listed}): use a new or empty directory"
        )
    for entry in sorted(path.iterdir()):  # links to directories are allowed
        inside = entry.resolve().is_relative_to(path.resolve())
        if entry.is_symlink() and not entry.is_dir() and not inside:
            raise UsageError(
                f"--output_dir {path}: {entry.name} is a link to {entry.resolve()}, which the run "
                "would overwrite: copy the file into the directory instead"
            )
    checkpoints = (*path.glob("checkpoints/*"), *path.glob("checkpoint-*"))
    resumable = any(CHECKPOINT_PATH.match(p.relative_to(path).as_posix()) for p in checkpoints)
    if overwrite:
        move_aside(path, _old_files(path))
    elif any(matches_any(p, WEIGHT_FILES) for p in path.iterdir()) and not resumable:
        raise UsageError(
            f"--output_dir {path} contains model weights but no checkpoint to resume from: use "
            "another directory, or move the weights aside with --overwrite_output_dir"
        )


def matches_any(path: Path, patterns: Iterable[str]) -> bool:
    """Returns whether the name of ``path`` matches one of the patterns."""
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _old_files(path: Path) -> list[Path]:
    patterns = (*WEIGHT_FILES, *CHECKPOINTS, *LOG_FILES)
    return [entry for entry in sorted(path.iterdir()) if matches_any(entry, patterns)]


def move_aside(path: Path, entries: list[Path]) -> None:
    """Moves files and folders of an output directory to its new subdirectory ``previous-<time>/``.

    Args:
        path: The directory.
        entries: The files and folders.
    """
    if not entries:
        return
    name = time.strftime("previous-%Y%m%d-%H%M%S")
    num_previous = sum(p.name == name or p.name.startswith(f"{name}-") for p in path.iterdir())
    target = path / (f"{name}-{num_previous + 1}" if num_previous else name)
    for entry in entries:
        new_path = target / entry.relative_to(path)
        new_path.parent.mkdir(parents=True, exist_ok=True)
        os.rename(entry, new_path)
    logger.warning("moved %d old files and folders in %s to %s", len(entries), path, target.name)
