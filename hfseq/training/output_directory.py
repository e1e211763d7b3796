"""Prepares the output directory of a run, and checks its devices.

The directory is validated and locked, and damaged checkpoints in it are moved aside.
"""

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

from hfseq.checkpoints import hub
from hfseq.checkpoints.storage import Workspace, check_output_dir
from hfseq.errors import CheckpointError, UsageError
from hfseq.training import checkpointer, processes
from hfseq.training.arguments import TrainingArguments

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_FILE = ".hfseq-run.lock"


@contextlib.contextmanager
def prepare_output_dir(training: TrainingArguments, model: str | None) -> Iterator[Workspace]:
    """Context manager that prepares the output directory of a run.

    If the run trains, the directory stays locked until the context ends, and damaged checkpoints
    are moved aside. The local copy of a remote directory is updated.

    Args:
        training: The training flags.
        model: The value of `--model_name_or_path`.

    Yields:
        The workspace of the output directory.

    Raises:
        UsageError: The directory cannot be written or is not shared by all processes, another run
            uses it, or it contains other files.
        CheckpointError: All of its checkpoints are damaged.
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
                    checkpointer.finish_going_back(folder, workspace.push)
                    same = model and Path(model).absolute() == folder.absolute()
                    if same and training.overwrite_output_dir:
                        raise UsageError(
                            f"--overwrite_output_dir would move the weights of "
                            f"--model_name_or_path {model} aside before they are read: use "
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
    """Context manager that locks an output directory.

    The operating system releases the lock when the process ends for any reason, so the lock file of
    a killed run does not block later runs. On file systems without locks, a warning is logged.

    Raises:
        UsageError: Another run has locked the directory. The message contains its process, machine
            and start time.
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
                record = json.loads(file.read())
                holder = (
                    f"process {record['process']} on {record['machine']} since {record['since']}"
                )
            except (ValueError, KeyError, TypeError):  # the other run is still writing its record
                holder = "another run"
            raise UsageError(
                f"--output_dir {folder} is in use by {holder}: wait until it has ended, or use "
                "another directory"
            ) from None
        except OSError as error:
            logger.warning(
                "cannot lock %s (%s): a second run could use it at the same time",
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
    """Moves the latest checkpoints aside if they are damaged, and logs a warning.

    All checkpoints after the latest intact one are renamed to `checkpoint-<step>-damaged`, next to
    the folder `checkpoints`. The run then repeats the steps after the intact checkpoint. If no
    checkpoint is intact, nothing is moved.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    folder = output_dir / hub.CHECKPOINT_DIR
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
            f"no checkpoint can be restored ({listing}): restore one from a backup, or start a new "
            "run with --overwrite_output_dir, which moves existing files aside"
        )
    for step in damaged:
        target = output_dir / f"checkpoint-{step}-damaged"
        count = len(list(output_dir.glob(f"{target.name}*")))
        os.rename(
            folder / str(step), target.with_name(f"{target.name}-{count + 1}") if count else target
        )
    if damaged:
        logger.warning(
            "checkpoints are damaged: %s. They were renamed to %s. Resuming from step %d, the "
            "latest intact checkpoint",
            listing,
            ", ".join(f"checkpoint-{step}-damaged" for step in damaged),
            steps[len(steps) - len(damaged) - 1],
        )


# -- devices


def require_device(device: str | None) -> None:
    """Checks that jax runs on the device type that `--device` requires.

    Args:
        device: The value of `--device`. With `None`, any device type is accepted.

    Raises:
        UsageError: jax runs on a different device type.
    """
    if device is None:
        return
    backend = "gpu" if device == "cuda" else device
    if jax.default_backend() != backend:
        available = ", ".join(sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()}))
        extra = "cuda" if backend == "gpu" else backend
        raise UsageError(
            f"--device {device} is not available, jax only finds {available}: install "
            f"hfseq[{extra}], check `hfseq env`, or drop --device"
        )


def use_compilation_cache(folder: str | None) -> None:
    """Enables the persistent compilation cache.

    Args:
        folder: The directory, or "none" for no cache. Default: `$HFSEQ_CACHE/xla`, or
            `~/.cache/hfseq/xla` if the variable is not set. If a cache is already configured in
            jax, for instance with `JAX_COMPILATION_CACHE_DIR`, `folder` is ignored.
    """
    if folder == "none" or jax.config.values["jax_compilation_cache_dir"]:
        return
    cache = Path(os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq").expanduser()
    path = folder or str(cache / "xla")
    jax.config.update("jax_compilation_cache_dir", path)
    logger.debug("compilation cache: %s", path)
