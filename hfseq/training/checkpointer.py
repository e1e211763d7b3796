"""Training checkpoints. This is the only module that uses orbax.

A checkpoint contains the training state (parameters, optimizer state and so on) as a dict, and the
progress of the run as a small JSON file, the *record*. Saving is asynchronous and atomic. A
checkpoint can be restored onto another mesh: `Checkpointer.restore` accepts the shardings of the
new mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, get_type_hints

import jax

from hfseq import errors
from hfseq.checkpoints import hub
from hfseq.checkpoints.storage import move_aside
from hfseq.errors import CheckpointError, first_line, write_atomically
from hfseq.training import processes
from hfseq.training.state import TrainState

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Progress:
    """The counters of a run. They are kept on the host and saved with every checkpoint.

    Attributes:
        step: Number of completed steps.
        tokens_seen: Number of training tokens so far. On accelerators, the number that a callback
            sees may lag a few steps behind.
        best_metric: The best value of `metric_for_best_model` so far.
        best_step: The step at which `best_metric` was measured.
        global_batch_size: Rows per step.
        seconds: Training time in seconds, including the time before the run was resumed.
        stream: Position in streamed data, or `None` if the data is not streamed.
        windows: The flags that determine how rows are split into windows, or `None` without
            `--update_length`.
        collections: The sizes of the model's non-parameter collections, and the name of the
            `--precision` recipe that they belong to.
        data: The flags and sizes that determine the order of the training data.
        first_samples: Sample inputs and outputs of the model before training, or `None`. Only
            saved if there are any.
    """

    step: int = 0
    tokens_seen: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    global_batch_size: int = 0
    seconds: float = 0.0
    stream: dict | None = None
    windows: dict | None = None
    collections: dict | None = None
    data: dict | None = None
    first_samples: list | None = None


@functools.cache
def _orbax() -> ModuleType:
    """Imports orbax, and suppresses error output from its threads after a failed save.

    After a failed save, threads of tensorstore still report to an event loop that orbax has already
    closed. Python prints a traceback for each file, either through `sys.excepthook` or through
    `sys.unraisablehook`. Both hooks are replaced by hooks that ignore this error.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    original_excepthook, original_unraisablehook = sys.excepthook, sys.unraisablehook

    def is_late(error: BaseException | None) -> bool:
        return type(error) is RuntimeError and str(error) == "Event loop is closed"

    def excepthook(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not is_late(error):
            original_excepthook(error_type, error, trace)

    def unraisablehook(unraisable: sys.UnraisableHookArgs) -> None:
        if not is_late(unraisable.exc_value):
            original_unraisablehook(unraisable)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    return ocp


class Checkpointer:
    """The checkpoints of a run, in `<output_dir>/checkpoints/<step>`.

    Args:
        output_dir: The output directory of the run.
        limit: Number of checkpoints to keep, in addition to the best one. `None` keeps all.
    """

    def __init__(self, output_dir: str | Path, limit: int | None = 2):
        self.folder, self.limit = Path(output_dir).absolute() / hub.CHECKPOINT_DIR, limit
        #: Step of the checkpoint that `--resume_from_checkpoint` names. It is kept in addition to
        #: `limit` checkpoints.
        self.named_step: int | None = None
        self._checksum_thread: threading.Thread | None = None
        self._save_finished = threading.Event()

    @functools.cached_property
    def _manager(self) -> CheckpointManager:
        options = _orbax().CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        # Compression makes the files 7 % smaller, but saving takes 2.6 times as long and 50 % more
        # memory.
        handlers = {
            "state": _orbax().PyTreeCheckpointHandler(use_compression=False),
            "record": _orbax().JsonCheckpointHandler(),
        }
        try:
            return _orbax().CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error}") from error

    def steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, in ascending order."""
        return sorted(self._manager.all_steps()) if self.folder.is_dir() else []

    def latest_step(self) -> int | None:
        """Returns the largest step that has a complete checkpoint, or `None`."""
        return max(self.steps(), default=None)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Starts saving a checkpoint in the background.

        Old checkpoints are deleted only after the previous save is known to be complete.

        Raises:
            CheckpointError: The checkpoint, or the previous one, could not be saved.
        """
        step = progress.step
        if step in self.steps():
            return
        try:
            self._manager.wait_until_finished()
            self._join_checksum_thread()
            self._prune(progress.best_step)
            needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            total, _, free = shutil.disk_usage(self.folder)
            if jax.process_count() == 1 and total and free < needed:  # a total of 0 means unlimited
                raise OSError(
                    f"no space left: the checkpoint needs about {needed / 1e6:.1f} MB, and "
                    f"{free / 1e6:.1f} MB are free"
                )
            record = dataclasses.asdict(progress)
            if progress.first_samples is None:
                del record["first_samples"]
            items = _orbax().args.Composite(
                state=_orbax().args.PyTreeSave(state.to_dict()),
                record=_orbax().args.JsonSave(record),
            )
            self._manager.save(step, args=items, force=True)
            if jax.process_index() == 0:
                self._save_finished.clear()
                folder = self.folder / str(step)
                self._checksum_thread = threading.Thread(
                    target=self._write_checksums_when_complete, args=(folder,), daemon=True
                )
                self._checksum_thread.start()
        except Exception as error:  # orbax wraps I/O errors in its own types
            raise self._not_saved(step, error) from error

    def wait(self) -> None:
        """Waits until all started saves are complete.

        Raises:
            CheckpointError: A save failed.
        """
        if "_manager" not in vars(self):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_saved(self._manager.latest_step() or 0, error) from error
        finally:
            self._join_checksum_thread()

    def _write_checksums_when_complete(self, folder: Path) -> None:
        """Waits until the checkpoint is complete, i.e. its folder exists, and writes checksums."""
        while not folder.is_dir():
            if self._save_finished.wait(POLL_INTERVAL) and not folder.is_dir():
                return
        with contextlib.suppress(OSError):  # on a full disk, the checkpoint has no checksums
            write_checksums(folder)

    def _join_checksum_thread(self) -> None:
        """Waits for the checksum thread. Must be called after the save has completed or failed."""
        if self._checksum_thread is not None:
            self._save_finished.set()
            self._checksum_thread.join()
            self._checksum_thread = None

    def wait_and_log_errors(self) -> None:
        """Waits until all started saves are complete, and logs errors instead of raising them.

        Call this instead of `wait` while another exception is handled, so that an error of the save
        does not hide that exception.
        """
        try:
            self.wait()
        except CheckpointError as error:
            logger.warning("%s", error)

    def finish(self, best_step: int | None = None) -> None:
        """Waits until all saves are complete, and deletes checkpoints beyond the limit."""
        self.wait()
        self._prune(best_step, spare=0)

    def _prune(self, best_step: int | None, spare: int = 1) -> None:
        """Deletes old checkpoints.

        The newest `limit - spare` checkpoints are kept, and also the best one and `named_step`.
        Before a save, `spare=1` leaves space for the new checkpoint. At least one checkpoint is
        always kept. With a limit of 1, the old checkpoint is therefore deleted only after the new
        one is complete.
        """
        if self.limit is None:
            return
        keep = max(self.limit - spare, 1)
        for step in self.steps()[:-keep]:
            if step not in (best_step, self.named_step):
                self._manager.delete(step)

    def go_back(self, step: int, push: Callable[[], object]) -> None:
        """Moves the checkpoints after a step aside; see `move_newer_aside`."""
        with processes.main_process_first() as leads:
            if leads:
                move_newer_aside(self.folder.parent, step, push)
        self._manager.reload()

    def verify_checksums(self, step: int) -> None:
        """Verifies the files of a checkpoint.

        Raises:
            CheckpointError: A file is missing, or has changed since the checkpoint was saved.
        """
        if text := find_damage(self.folder / str(step)):
            raise self._damaged(step, ValueError(text))

    def read_progress(self, step: int) -> Progress:
        """Reads the progress of the run from a checkpoint.

        Raises:
            CheckpointError: The record cannot be read, or has invalid fields.
        """
        try:
            items = self._manager.restore(
                step, args=_orbax().args.Composite(record=_orbax().args.JsonRestore())
            )
        except Exception as error:
            raise self._damaged(step, error) from error
        record = dict(items["record"])
        types = get_type_hints(Progress)
        types |= {"seconds": int | float, "best_metric": int | float | None}
        invalid_keys = [
            key for key, value in record.items() if not isinstance(value, types.get(key, ()))
        ]
        if invalid_keys or record.get("step", step) != step:
            names = ", ".join(sorted(map(str, invalid_keys))) or "step"
            raise CheckpointError(
                f"the record of the checkpoint {self.folder / str(step)} is damaged: it has "
                f"invalid values ({names}). Use an earlier checkpoint with "
                "--resume_from_checkpoint"
            )
        return Progress(**{"step": step, **record})

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Restores the state of a checkpoint.

        Args:
            step: The step of the checkpoint.
            abstract_state: A state of `jax.ShapeDtypeStruct` with the shapes, dtypes and shardings
                of the result.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model.
        """
        abstract = abstract_state.to_dict()  # orbax does not support None in the tree
        try:
            restore_args = _orbax().checkpoint_utils.construct_restore_args(abstract)
            args = _orbax().args.PyTreeRestore(abstract, restore_args=restore_args)
            items = self._manager.restore(step, args=_orbax().args.Composite(state=args))
            leaves, tree = jax.tree.flatten(items["state"])
        except Exception as error:
            raise self._damaged(step, error) from error
        del items
        # The arrays from orbax may share buffers with the file cache. They must be copied, because
        # the training step donates its input. Copying one leaf at a time saves memory.
        for number, leaf in enumerate(leaves):
            leaves[number] = leaf.copy()
        return TrainState(**jax.tree.unflatten(tree, leaves))

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder / str(step)} cannot be restored ({first_line(error)}): "
            "it is damaged, or belongs to another model. Use an earlier checkpoint with "
            "--resume_from_checkpoint, or start a new run with --overwrite_output_dir"
        )

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        latest_step = self.latest_step()
        return CheckpointError(
            f"could not save the checkpoint of step {step} to {self.folder} ({first_line(error)}); "
            + (
                f"the checkpoint of step {latest_step} is kept"
                if latest_step
                else "no earlier checkpoint exists"
            )
            + ". Free some disk space and run the same command again to resume"
        )


def find_checkpoint(checkpointer: Checkpointer, path: str | None) -> tuple[Checkpointer, Progress]:
    """Finds the checkpoint to resume from, and reads its progress.

    Args:
        checkpointer: The checkpoints of this run.
        path: The value of `--resume_from_checkpoint`: an output directory, or one checkpoint in it.
            Default: the latest checkpoint of this run.

    Returns:
        The `Checkpointer` to restore from, and the progress. Without any checkpoint, the progress
        has step 0.

    Raises:
        CheckpointError: `path` contains no checkpoint, or the checkpoint is damaged.
    """
    source, step = checkpointer, None
    if path:
        folder = Path(path)
        if folder.name.isdigit() and folder.parent.name == hub.CHECKPOINT_DIR:
            if not folder.is_dir():
                steps = Checkpointer(folder.parent.parent, limit=None).steps()
                advice = f"; there are checkpoints of the steps {', '.join(map(str, steps))}"
                raise CheckpointError(
                    f"--resume_from_checkpoint {folder} does not exist{advice if steps else ''}"
                )
            folder, step = folder.parent.parent, int(folder.name)
        elif not (folder / hub.CHECKPOINT_DIR).is_dir():
            raise CheckpointError(
                f"--resume_from_checkpoint {folder} contains no checkpoints: use an output "
                f"directory or <output_dir>/{hub.CHECKPOINT_DIR}/<step>"
            )
        if folder.absolute() != checkpointer.folder.parent:
            source = Checkpointer(folder, limit=None)
        else:
            checkpointer.named_step = step
    step = source.latest_step() if step is None else step
    if step is None:
        return source, Progress()
    if path and jax.process_index() == 0:  # without `path`, it was verified at startup
        source.verify_checksums(step)
    return source, source.read_progress(step)


#: This file contains the step to which a run goes back. It is deleted when all newer checkpoints
#: have been moved.
GOING_BACK_FILE = ".hfseq-going-back"


def move_newer_aside(folder: Path, step: int, push: Callable[[], object]) -> None:
    """Moves the checkpoints after a step to ``previous-<time>/`` in the output directory.

    A run that resumes from an earlier checkpoint trains and saves the following steps again. Its
    newer checkpoints are moved, because they would prevent these saves, and because a later run
    would otherwise resume from them. If the process is killed during the move, `finish_going_back`
    moves the remaining checkpoints.

    Args:
        folder: The output directory.
        step: The step that the run goes back to.
        push: Function that updates the remote copy of the directory, if there is one.
    """
    checkpoints = folder / hub.CHECKPOINT_DIR
    names = [path.name for path in checkpoints.glob("*") if path.name.isdigit()]
    newer = sorted(number for number in map(int, names) if number > step)
    marker = folder / GOING_BACK_FILE
    if newer:
        logger.warning(
            "going back to step %d: the checkpoints of the steps %s are moved aside",
            step,
            ", ".join(map(str, newer)),
        )
        write_atomically(marker, str(step))
        move_aside(folder, [checkpoints / str(number) for number in newer])
        push()
    marker.unlink(missing_ok=True)


def finish_going_back(folder: Path, push: Callable[[], object]) -> None:
    """Completes a call of `move_newer_aside` during which the process was killed."""
    if (marker := folder / GOING_BACK_FILE).exists():
        move_newer_aside(folder, int(marker.read_text()), push)


# -- checksums

CHECKSUMS_FILE = "checksums.json"
CHUNK_SIZE = 1 << 22
POLL_INTERVAL = 0.05  # seconds between checks whether a checkpoint is complete


def write_checksums(folder: Path) -> None:
    """Writes the size and the CRC-32 of each file in the folder of a complete checkpoint."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    checksums = {
        name: _size_and_crc(folder / name) for name in names if not name.startswith(CHECKSUMS_FILE)
    }
    write_atomically(folder / CHECKSUMS_FILE, json.dumps(checksums))


def find_damage(folder: Path) -> str:
    """Checks the files of a checkpoint.

    If the run was killed right after the save, the checksums do not exist. In this case, the
    function only checks that the state and the record exist and that the record can be read.

    Returns:
        A description of the damage, or an empty string.
    """
    try:
        checksums = errors.parse_json((folder / CHECKSUMS_FILE).read_bytes())
        for name, expected in checksums.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (actual := _size_and_crc(folder / name)) != expected:
                sizes = f"{actual[0]} bytes instead of {expected[0]}"
                return (
                    f"{name} has {sizes if actual[0] != expected[0] else 'changed since the save'}"
                )
        return ""
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as error:
        return f"{CHECKSUMS_FILE} cannot be read: {error}"
    for name in ("state", "record"):
        if not (folder / name).is_dir():
            return f"{name} is missing"
    try:
        errors.parse_json((folder / "record" / "metadata").read_bytes())
    except (OSError, ValueError) as error:
        return f"record cannot be read: {error}"
    return ""


def _size_and_crc(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_SIZE):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
