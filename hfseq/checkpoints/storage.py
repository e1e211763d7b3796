"""Output directories: what may lie in one, and remote ones (fsspec URLs) through a local copy."""

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
    one_line,
    parse_json,
    write_atomically,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("hfseq.checkpoints.storage")

#: At the URL: the complete checkpoints. Beside the local copy: what both sides have.
LATEST_FILE, SYNC_FILE = "latest.json", ".hfseq-sync.json"
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
CHECKPOINT_PATH = re.compile(r"(checkpoints/|checkpoint-)\d+(/|$)")
UNSYNCED_FILES = (
    *("*.tmp", "*.tmp-*", "*.orbax-checkpoint-tmp*", ".cache/*", "wandb/*", "*.lock"),
    *(LATEST_FILE, SYNC_FILE),
)

# What may lie in an output directory.
WEIGHT_FILES = (
    *("model*.safetensors*", "flax_model*.msgpack*", "pytorch_model*.bin*"),
    *("fp8_params.safetensors", "adapter_config.json", "adapter_model.safetensors"),
)
CHECKPOINTS = ("checkpoints", "checkpoint-*")
LOG_FILES = (
    *("runs", "wandb", "wandb_run_id", "metrics.jsonl", "profile", "logs", "plots", "*.png"),
    *("*_results.json", "trainer_state.json", "training_args*", "training_arguments*", "run.json"),
    *("generated_*.txt", "test_results*.tsv", "predictions.*", "nbest_predictions.json"),
    "null_odds.json",
)
PREPARED_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*chat_template*", "spm_char*", "*.py"),
    *("preprocessor_config.json", "README*", "MODEL_CARD.md", "LICEN[SC]E*", "CITATION*"),
    *("NOTICE*", "modules.json", "*sentence_*.json", "[0-9]_*"),
    *(".*", "__pycache__", "previous-*", "*.tmp*", "*.log", "*.out", "*.err", "*.yaml", "*.yml"),
)
RUN_FILES = (*WEIGHT_FILES, *CHECKPOINTS, *LOG_FILES, *PREPARED_FILES)


class Workspace:
    """A run's output directory as a local path, whatever ``output_dir`` is.

    A local directory is used as it is. Of a URL ("gs://bucket/run") a local copy is kept, by
    default in the cache (HFSEQ_CACHE, else ~/.cache/hfseq): ``pull`` it before the run, ``push`` it
    after each save. Checkpoints count as soon as ``latest.json`` at the URL names them, which is
    written after all their files; so an interrupted push leaves the previous state in force.
    """

    def __init__(self, output_dir: str | os.PathLike[str], scratch: Path | None = None) -> None:
        self.url = os.fspath(output_dir)
        protocol, separator, rest = self.url.partition("://")
        self.is_remote = bool(separator) and protocol not in ("file", "local")
        if not self.is_remote:
            self.path = Path(rest if separator else self.url)
            return
        import fsspec

        self._fs: AbstractFileSystem
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            package = PACKAGES.get(protocol, error.name or protocol)
            raise UsageError(
                f"--output_dir {protocol}://... needs the package {package}: pip install {package}"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"--output_dir: unknown protocol '{protocol}://'; use a local directory, gs://, "
                "s3:// or another file system of fsspec"
            ) from error
        self._root = root.rstrip("/")
        cache = Path(os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq").expanduser()
        name = re.sub(r"[^\w.-]", "-", self.url.rstrip("/").rpartition("/")[2]) or "run"
        digest = hashlib.sha256(self.url.rstrip("/").encode()).hexdigest()[:12]
        self.path = scratch or cache / "workspaces" / f"{name}-{digest}"
        # What both sides have: the id of the remote state, and size and time of each local file.
        try:
            sync = parse_json((self.path / SYNC_FILE).read_bytes())
        except (OSError, ValueError):
            sync = {}
        sync = sync if isinstance(sync, dict) else {}
        self._id: str | None = sync.get("id")
        self._synced = {name: tuple(stamp) for name, stamp in sync.get("files", {}).items()}

    def pull(self) -> None:
        """Bring the local copy up to date; what was saved here but not pushed yet stays.

        If the remote state has changed since (another machine pushed, or it was deleted), it wins,
        and checkpoints that exist here alone are moved to ``previous-<time>/``. CheckpointError if
        the storage cannot be read.
        """
        if not self.is_remote:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            network.run_with_stall_timeout(self._pull)
        except Exception as error:  # each backend has errors of its own
            hangs = isinstance(error, network.TransferStalled)
            reason = f"{error}; the same command goes on" if hangs else _reason(error)
            raise CheckpointError(f"cannot read {self._shown}: {reason}") from error

    def _pull(self) -> None:
        remote, latest = self._remote_files(), {}
        if self._fs.exists(self._remote(LATEST_FILE)):
            latest = parse_json(self._fs.cat_file(self._remote(LATEST_FILE)))
        complete = latest.get("files", {})
        changed = latest.get("id") != self._id
        if changed and latest:
            here = {_checkpoint(name) for name, _ in self._local_files()} - {""}
            unknown = here - {_checkpoint(name) for name in complete}
            _move_aside(self.path, [self.path / name for name in sorted(unknown)])
        elif changed:
            _move_aside(self.path, _old_files(self.path))
            self._synced.clear()
        for name, size in self._wanted(remote, complete):
            local = self.path / name
            if not local.exists() or (changed and not CHECKPOINT_PATH.match(name)):
                self._download(name, size)
                self._synced[name] = _stamp(local)
        self._remember(latest.get("id"))

    def push(self, strict: bool = False, timeout: float | None = None) -> bool:
        """Upload what is new or changed and return whether that worked.

        A failure is logged as a warning, and the next push makes it good; with ``strict`` it
        raises CheckpointError. It has failed, too, when no bytes have moved for ``timeout``
        seconds, by default those of ``--hub_timeout``.
        """
        if not self.is_remote:
            return True
        try:
            network.run_with_stall_timeout(self._push, timeout)
            return True
        except Exception as error:  # each backend has errors of its own
            message = self.incomplete_message(
                str(error) if isinstance(error, network.TransferStalled) else _reason(error)
            )
            if strict:
                raise CheckpointError(
                    f"{message}: the same command, on this machine, goes on"
                ) from error
            logger.warning("%s, and the next save tries again", message)
            return False

    def incomplete_message(self, reason: str) -> str:
        """Say that the URL lacks something, and why, and where it is."""
        return f"cannot write {self._shown} ({reason}); all is kept in {self.path}"

    def _push(self) -> None:
        local = dict(self._local_files())
        # Checkpoints first: newer logs and weights must not be there without their checkpoint.
        for name in sorted(local, key=lambda name: not CHECKPOINT_PATH.match(name)):
            if self._synced.get(name) != local[name]:
                _go_on()
                self._fs.put_file(str(self.path / name), self._remote(name))
                self._synced[name] = local[name]
        checkpoints = {
            name: size for name, (size, _) in local.items() if CHECKPOINT_PATH.match(name)
        }
        state = uuid.uuid4().hex
        latest = json.dumps({"id": state, "files": checkpoints})
        _go_on()
        self._fs.pipe_file(self._remote(LATEST_FILE), latest.encode())
        self._remember(state)
        for name in self._remote_files():
            known = CHECKPOINT_PATH.match(name) or name in self._synced
            if known and name not in local and not name.startswith("previous-"):
                _go_on()
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
        """Names relative to the root, and sizes."""
        self._fs.invalidate_cache()
        prefix = len(self._root.rstrip("/")) + 1
        found = self._fs.find(self._root, detail=True)
        return {path[prefix:]: int(info["size"] or 0) for path, info in found.items()}

    def _local_files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and not _skipped(name):
                yield name, _stamp(path)

    def _wanted(self, remote: dict[str, int], complete: dict[str, int]) -> list[tuple[str, int]]:
        """Files to have locally: of checkpoints only the complete ones that ``latest`` names."""
        damaged = {_checkpoint(n) for n, size in complete.items() if remote.get(n) != size}
        for name in sorted(damaged):
            logger.warning("%s/%s is incomplete and left out", self._shown, name)
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
                raise OSError(f"{name} has {temporary.stat().st_size} bytes where {size} are due")


def _go_on() -> None:
    if network.is_abandoned():  # it hung and woke up, perhaps beside the next
        raise CheckpointError("nobody waits for this upload any more")


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
    """Refuse a directory that holds something else; with ``overwrite``, make room in it.

    A prepared config and tokenizer, and whatever a run writes itself, are welcome: the run resumes
    from its checkpoints. Anything not matching ``ours``, or weights without a checkpoint to resume
    from (training would replace them), raises UsageError. With ``overwrite`` old weights,
    checkpoints and logs are moved to ``previous-<time>/`` in the directory; nothing is deleted.
    """
    path, patterns = Path(path), tuple(allowed)
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"--output_dir {path} is a file; name a directory")
    foreign = sorted(p.name for p in path.iterdir() if not matches_any(p, patterns))
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" * (len(foreign) > 5))
        raise UsageError(
            f"--output_dir {path} holds something else ({shown}); name a new or empty directory"
        )
    for entry in sorted(path.iterdir()):  # folders may be links
        inside = entry.resolve().is_relative_to(path.resolve())
        if entry.is_symlink() and not entry.is_dir() and not inside:
            raise UsageError(
                f"--output_dir {path}: {entry.name} is a link to {entry.resolve()}, and the run "
                "would write there: copy the file into the directory instead"
            )
    checkpoints = (*path.glob("checkpoints/*"), *path.glob("checkpoint-*"))
    resumable = any(CHECKPOINT_PATH.match(p.relative_to(path).as_posix()) for p in checkpoints)
    if overwrite:
        _move_aside(path, _old_files(path))
    elif any(matches_any(p, WEIGHT_FILES) for p in path.iterdir()) and not resumable:
        raise UsageError(
            f"--output_dir {path} holds a model's weights but no checkpoint to resume from; name "
            "another directory, or move them aside with --overwrite_output_dir"
        )


def matches_any(path: Path, patterns: Iterable[str]) -> bool:
    """Tell whether the name of ``path`` fits one of the patterns."""
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _old_files(path: Path) -> list[Path]:
    old = (*WEIGHT_FILES, *CHECKPOINTS, *LOG_FILES)
    return [entry for entry in sorted(path.iterdir()) if matches_any(entry, old)]


def _move_aside(path: Path, entries: list[Path]) -> None:
    if not entries:
        return
    name = time.strftime("previous-%Y%m%d-%H%M%S")
    taken = sum(p.name == name or p.name.startswith(f"{name}-") for p in path.iterdir())
    target = path / (f"{name}-{taken + 1}" if taken else name)
    for entry in entries:
        moved = target / entry.relative_to(path)
        moved.parent.mkdir(parents=True, exist_ok=True)
        os.rename(entry, moved)
    logger.warning("moved %d old files and folders of %s to %s", len(entries), path, target.name)
