"""Training checkpoints: the one file that knows orbax.

A checkpoint holds the whole state (parameters, optimizer, collections, log window) as a dict, and a
small JSON record, the run's progress. Saving is asynchronous and atomic; restoring onto another
mesh is a matter of passing other shardings.
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
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, get_type_hints

import jax

from hfseq import errors
from hfseq.errors import CheckpointError, first_line, write_atomically
from hfseq.training.state import TrainState

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"


@dataclasses.dataclass
class Progress:
    """Where the run stands: numbers of the host, saved with every checkpoint."""

    step: int = 0
    tokens_seen: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    global_batch_size: int = 0
    seconds: float = 0.0
    stream: dict | None = None  # position in streamed data
    windows: dict | None = None  # how rows are cut
    collections: dict | None = None  # what is beside the parameters, and by which recipe


@functools.cache
def _orbax() -> ModuleType:
    """Import orbax, and keep it from saying a second time what is raised here.

    When a save has failed, tensorstore's threads report to an event loop that orbax has closed by
    then: a traceback a file, by either of two hooks.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    on_raised, on_ignored = sys.excepthook, sys.unraisablehook

    def is_late(error: BaseException | None) -> bool:
        return type(error) is RuntimeError and str(error) == "Event loop is closed"

    def raised(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not is_late(error):
            on_raised(kind, error, trace)

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if not is_late(unraisable.exc_value):
            on_ignored(unraisable)

    sys.excepthook, sys.unraisablehook = raised, ignored
    return ocp


class Checkpointer:
    """The checkpoints of a run, under ``<output_dir>/checkpoints/<step>``.

    **Arguments:** ``limit`` is how many to keep (``None`` keeps all); the best one is kept besides.
    """

    def __init__(self, output_dir: str | Path, limit: int | None = 2):
        self.folder, self.limit = Path(output_dir).absolute() / CHECKPOINTS_FOLDER, limit
        self._sealing: threading.Thread | None = None
        self._over = threading.Event()

    @functools.cached_property
    def _manager(self) -> CheckpointManager:
        options = _orbax().CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        # Compressed floats are 7 % smaller and take 2.6 times as long and half as much memory more.
        handlers = {
            "state": _orbax().PyTreeCheckpointHandler(use_compression=False),
            "record": _orbax().JsonCheckpointHandler(),
        }
        try:
            return _orbax().CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error}") from error

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint."""
        return sorted(self._manager.all_steps()) if self.folder.is_dir() else []

    def latest_step(self) -> int | None:
        """Return the newest of these steps; steps count, whatever the clock said."""
        return max(self.steps(), default=None)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Start saving; old checkpoints go only when the previous save is known to be complete."""
        step = progress.step
        if step in self.steps():
            return
        try:
            self._manager.wait_until_finished()
            self._end_sealing()
            self._prune(progress.best_step)
            needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            total, _, free = shutil.disk_usage(self.folder)
            if jax.process_count() == 1 and total and free < needed:  # 0: it has no limit
                raise OSError(
                    f"no space left: it needs about {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are "
                    "free"
                )
            items = _orbax().args.Composite(
                state=_orbax().args.PyTreeSave(state.to_dict()),
                record=_orbax().args.JsonSave(dataclasses.asdict(progress)),
            )
            self._manager.save(step, args=items, force=True)
            if jax.process_index() == 0:
                self._over.clear()
                folder = self.folder / str(step)
                self._sealing = threading.Thread(target=self._seal, args=(folder,), daemon=True)
                self._sealing.start()
        except Exception as error:  # orbax wraps I/O errors in types of its own
            raise self._not_saved(step, error) from error

    def wait(self) -> None:
        """Wait until what was started is on disk."""
        if "_manager" not in vars(self):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_saved(self._manager.latest_step() or 0, error) from error
        finally:
            self._end_sealing()

    def _seal(self, folder: Path) -> None:
        """Note the sums of a checkpoint as soon as it is complete: it appears then."""
        while not folder.is_dir():
            if self._over.wait(POLL_INTERVAL) and not folder.is_dir():
                return
        with contextlib.suppress(OSError):  # a full disk: without sums there is no check
            write_checksums(folder)

    def _end_sealing(self) -> None:
        """Return when that is done; whatever was being saved is complete, or never will be."""
        if self._sealing is not None:
            self._over.set()
            self._sealing.join()
            self._sealing = None

    def wait_and_log_errors(self) -> None:
        """Wait for a save under way on the way out, without hiding the error that leads there."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.warning("%s", error)

    def finish(self, best_step: int | None = None) -> None:
        """Wait, and remove what the limit does not allow."""
        self.wait()
        self._prune(best_step, spare=0)

    def _prune(self, best_step: int | None, spare: int = 1) -> None:
        """Delete all but the newest ``limit - spare`` and the best: one place is for the next save.

        With a limit of 1 the last complete checkpoint stays until its successor is complete.
        """
        if self.limit is None:
            return
        keep = max(self.limit - spare, 1)
        for step in self.steps()[:-keep]:
            if step != best_step:
                self._manager.delete(step)

    def verify_checksums(self, step: int) -> None:
        """Raise CheckpointError if the files of a checkpoint are not those that were saved."""
        if text := find_damage(self.folder / str(step)):
            raise self._damaged(step, ValueError(text))

    def read_progress(self, step: int) -> Progress:
        """Read where the run stood at a checkpoint; a record of anything else is an error."""
        try:
            items = self._manager.restore(
                step, args=_orbax().args.Composite(record=_orbax().args.JsonRestore())
            )
        except Exception as error:
            raise self._damaged(step, error) from error
        record = dict(items["record"])
        kinds = get_type_hints(Progress)
        kinds |= {"seconds": int | float, "best_metric": int | float | None}
        wrong = [key for key, value in record.items() if not isinstance(value, kinds.get(key, ()))]
        if wrong or record.get("step", step) != step:
            names = ", ".join(sorted(map(str, wrong))) or "step"
            raise CheckpointError(
                f"the checkpoint {self.folder / str(step)} has a record that no run wrote "
                f"({names}): it is damaged; give an earlier one with --resume_from_checkpoint"
            )
        return Progress(**{"step": step, **record})

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Read the state of a checkpoint into the shapes and shardings of ``like``."""
        wanted = like.to_dict()  # orbax fails on a tree whose absent parts are None
        try:
            how = _orbax().checkpoint_utils.construct_restore_args(wanted)
            args = _orbax().args.PyTreeRestore(wanted, restore_args=how)
            items = self._manager.restore(step, args=_orbax().args.Composite(state=args))
            leaves, tree = jax.tree.flatten(items["state"])
        except Exception as error:
            raise self._damaged(step, error) from error
        del items
        # Orbax's arrays may share buffers with the file cache; the step donates its input. One by
        # one, so that the state is not there twice.
        for number, leaf in enumerate(leaves):
            leaves[number] = leaf.copy()
        return TrainState(**jax.tree.unflatten(tree, leaves))

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder / str(step)} cannot be restored ({first_line(error)}): "
            "it is damaged, or belongs to another model; give an earlier one with "
            "--resume_from_checkpoint, or start anew with --overwrite_output_dir"
        )

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        kept = self.latest_step()
        return CheckpointError(
            f"could not save the checkpoint of step {step} to {self.folder} ({first_line(error)}); "
            + (f"the checkpoint of step {kept} is kept" if kept else "there is no earlier one")
            + ": free some space and run the same command again to go on"
        )


def find_checkpoint(own: Checkpointer, path: str | None) -> tuple[Checkpointer, Progress]:
    """Return the checkpoints to go on from and the record of the one that is taken.

    ``path`` is ``--resume_from_checkpoint``: an output directory, or one checkpoint in it. Without
    it the newest of the run's ``own`` is taken; where there is none, the progress is of step 0.
    """
    source, step = own, None
    if path:
        folder = Path(path)
        if folder.name.isdigit() and folder.parent.name == CHECKPOINTS_FOLDER:
            if not folder.is_dir():
                raise CheckpointError(f"--resume_from_checkpoint {folder} does not exist")
            folder, step = folder.parent.parent, int(folder.name)
        elif not (folder / CHECKPOINTS_FOLDER).is_dir():
            raise CheckpointError(
                f"--resume_from_checkpoint {folder} holds no checkpoints: give an output directory "
                f"or <output_dir>/{CHECKPOINTS_FOLDER}/<step>"
            )
        if folder.absolute() != own.folder.parent:
            source = Checkpointer(folder, limit=None)
    step = source.latest_step() if step is None else step
    if step is None:
        return source, Progress()
    if path and jax.process_index() == 0:  # the run's own were looked at when it began
        source.verify_checksums(step)
    return source, source.read_progress(step)


# -- checksums

CHECKSUMS_FILE = "checksums.json"
CHUNK_SIZE = 1 << 22
POLL_INTERVAL = 0.05  # seconds between two looks for a checkpoint that is being written


def write_checksums(folder: Path) -> None:
    """Note size and CRC-32 of every file in ``folder``, which is complete."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    sums = {
        name: _size_and_crc(folder / name) for name in names if not name.startswith(CHECKSUMS_FILE)
    }
    write_atomically(folder / CHECKSUMS_FILE, json.dumps(sums))


def find_damage(folder: Path) -> str:
    """Return what is wrong with the files of a checkpoint, or an empty text.

    Where no sums were noted (the run was killed right after the save) only the record is looked at.
    """
    try:
        sums = errors.parse_json((folder / CHECKSUMS_FILE).read_bytes())
        for name, due in sums.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (now := _size_and_crc(folder / name)) != due:
                sizes = f"{now[0]} bytes where {due[0]} are due"
                return f"{name} has {sizes if now[0] != due[0] else 'other bytes than were saved'}"
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
