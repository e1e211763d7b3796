"""The output directory of a run (lock, strangers, damage), and the devices that it runs on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from hfseq.checkpoints.storage import Workspace, check_output_dir
from hfseq.errors import CheckpointError, UsageError
from hfseq.training import checkpointer, processes
from hfseq.training.arguments import TrainingArguments

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_FILE = ".hfseq-run.lock"


@contextlib.contextmanager
def prepare_output_dir(training: TrainingArguments, model: str | None) -> Iterator[Workspace]:
    """Make the output directory ready, and hold it while the body runs where that trains.

    The local copy of a remote directory is brought up to date, and damaged checkpoints are set
    aside. ``model`` is the directory or name of the weights to start from.

    Raises:
        UsageError: it cannot be written or is not shared, another run is at work in it, or
            something else lies there. CheckpointError: none of its checkpoints is whole.
    """
    workspace = Workspace(training.output_dir)
    folder = workspace.path
    with contextlib.ExitStack() as stack:
        with processes.main_process_first() as leads:
            processes.check_writable(folder)
            if leads:
                if training.do_train:
                    stack.enter_context(lock_directory(folder))
                workspace.pull()
                if training.do_train:
                    same = model and Path(model).absolute() == folder.absolute()
                    if same and training.overwrite_output_dir:
                        raise UsageError(
                            f"--overwrite_output_dir would move the weights of "
                            f"--model_name_or_path {model} aside before they are read: give "
                            "another --output_dir"
                        )
                    check_output_dir(folder, training.overwrite_output_dir)
                    if not training.resume_from_checkpoint:
                        move_damaged_checkpoints(folder)
        if training.do_train or workspace.is_remote:
            processes.check_shared(folder)
        yield workspace


@contextlib.contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Hold the lock of an output directory while the body runs.

    The system frees it when its holder ends, however that ends, so a file that a killed run left
    blocks nobody. Where a file system has no locks, a warning says so.

    Raises:
        UsageError: another run holds it; with that run's process, machine and time of start.
    """
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(
        os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+"
    ) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                known = json.loads(file.read())
                holder = f"process {known['process']} on {known['machine']} since {known['since']}"
            except (ValueError, KeyError, TypeError):  # it is just writing its name
                holder = "another run"
            raise UsageError(
                f"--output_dir {folder} is in use by {holder}: wait until it has ended, or give "
                "another directory"
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps a second run out of it",
                folder,
                error.strerror,
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.seek(0)
        file.truncate()
        file.write(
            json.dumps({"process": os.getpid(), "machine": socket.gethostname(), "since": since})
        )
        file.flush()
        yield


def move_damaged_checkpoints(output_dir: Path) -> None:
    """Move the newest checkpoints out of the way while they are damaged, and say so.

    They stay beside ``checkpoints`` as ``checkpoint-<step>-damaged``: the steps after the last
    whole one are done, and saved, anew. Nothing is moved where none is whole.

    Raises:
        CheckpointError: every checkpoint is damaged.
    """
    folder = output_dir / checkpointer.CHECKPOINTS_FOLDER
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit() and p.is_dir())
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        text = checkpointer.find_damage(folder / str(step))
        if not text:
            break
        damaged[step] = text
    listing = "; ".join(f"{folder / str(step)}: {text}" for step, text in damaged.items())
    if damaged and len(damaged) == len(steps):
        raise CheckpointError(
            f"no checkpoint can be restored ({listing}): restore one from a copy, or start anew "
            "with --overwrite_output_dir, which keeps what is there"
        )
    for step in damaged:
        target = output_dir / f"checkpoint-{step}-damaged"
        count = len(list(output_dir.glob(f"{target.name}*")))
        os.rename(
            folder / str(step), target.with_name(f"{target.name}-{count + 1}") if count else target
        )
    if damaged:
        logger.warning(
            "damaged: %s; kept as %s. The run goes on from step %d, the newest whole one",
            listing,
            ", ".join(f"checkpoint-{step}-damaged" for step in damaged),
            steps[len(steps) - len(damaged) - 1],
        )


# -- devices


def require_device(wanted: str | None) -> None:
    """Refuse to run on another kind of device than the one asked for."""
    if wanted is None:
        return
    backend = "gpu" if wanted == "cuda" else wanted
    if jax.default_backend() != backend:
        found = ", ".join(sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()}))
        extra = "cuda" if backend == "gpu" else backend
        raise UsageError(
            f"--device {wanted} was asked for, but jax sees only {found}: install hfseq[{extra}], "
            "look at `hfseq env`, or drop --device"
        )


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs between runs."""
    if folder == "none" or jax.config.values["jax_compilation_cache_dir"]:
        return
    cache = Path(os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq").expanduser()
    path = folder or str(cache / "xla")
    jax.config.update("jax_compilation_cache_dir", path)
    logger.debug("compiled programs are kept in %s", path)
