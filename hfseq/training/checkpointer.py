"""Training checkpoints: the one file that knows orbax.

A checkpoint holds the whole state (parameters, optimizer, collections, log window) and a small JSON
record (step, data position, batch size, best metric). Saving is asynchronous and atomic; restoring
onto another mesh is a matter of passing other shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import jax

from hfseq import errors
from hfseq.errors import CheckpointError, first_line, write_whole

logger = logging.getLogger(__name__)

FILE = "checksums.json"


CHUNK = 1 << 22


INTERVAL = 0.05  # seconds between two looks for a checkpoint that is being written


def write(folder: Path) -> None:
    """Note size and CRC-32 of every file in ``folder``, which is complete."""
    sums = {name: _sum(folder / name) for name in _names(folder)}
    write_whole(folder / FILE, json.dumps(sums))


def problem(folder: Path) -> str:
    """Return what is wrong with the files of a checkpoint, or an empty text.

    Where no sums were noted (the run was killed right after the save) only the record is looked at.
    """
    try:
        sums = errors.parse_json((folder / FILE).read_bytes())
        for name, known in sums.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (found := _sum(folder / name)) != known:
                sizes = f"{found[0]} bytes where {known[0]} are due"
                return (
                    f"{name} has {sizes if found[0] != known[0] else 'other bytes than were saved'}"
                )
        return ""
    except FileNotFoundError:
        return _unnoted_problem(folder)
    except (OSError, ValueError, AttributeError, TypeError, LookupError) as error:
        return f"{FILE} cannot be read: {error}"


def _unnoted_problem(folder: Path) -> str:
    missing = [name for name in ("state", "record") if not (folder / name).is_dir()]
    if missing:
        return f"{missing[0]} is missing"
    try:
        errors.parse_json((folder / "record" / "metadata").read_bytes())
    except (OSError, ValueError) as error:
        return f"record cannot be read: {error}"
    return ""


def _names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    return sorted(name for name in names if not name.startswith(FILE))


def _sum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


class Sealer:
    """Notes the sums of a checkpoint in a thread, as soon as it is complete."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, folder: Path) -> None:
        """Wait for ``folder`` to appear, which it does when it is complete, and note its sums."""
        self.end()
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, args=(folder,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return when the thread is done; whatever was being saved is complete, or never will."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _work(self, folder: Path) -> None:
        while not folder.is_dir():
            if self._stop.wait(INTERVAL) and not folder.is_dir():
                return
        try:
            write(folder)
        except OSError:  # a full disk; without sums there is no check, nothing worse
            return


FOLDER = "checkpoints"


class Checkpointer:
    """The checkpoints of a run, under ``<output_dir>/checkpoints/<step>``.

    **Arguments:** ``limit`` is how many to keep (``None`` keeps all); the best one is kept besides.
    """

    def __init__(self, output_dir: str | Path, limit: int | None = 2):
        self.folder, self.limit = Path(output_dir).absolute() / FOLDER, limit
        self._sealer = Sealer()

    @functools.cached_property
    def _ocp(self) -> Any:
        import orbax.checkpoint as ocp

        _quiet_late_callbacks()
        logging.getLogger("absl").setLevel(
            logging.CRITICAL
        )  # orbax logs what is raised here anyway
        return ocp

    @functools.cached_property
    def _manager(self) -> Any:
        options = self._ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        # Compressed floats are 7 % smaller and take 2.6 times as long and half as much memory more.
        handlers = {
            "state": self._ocp.PyTreeCheckpointHandler(use_compression=False),
            "record": self._ocp.JsonCheckpointHandler(),
        }
        try:
            return self._ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error}") from error

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint."""
        return sorted(self._manager.all_steps()) if self.folder.is_dir() else []

    def save(
        self, step: int, state: Any, record: dict[str, Any], best_step: int | None = None
    ) -> None:
        """Start saving; old checkpoints go only when the previous save is known to be complete."""
        if step in self.steps():
            return
        try:
            self._manager.wait_until_finished()
            self._sealer.end()
            self._prune(best_step)
            self._check_space(state)
            items = self._ocp.args.Composite(
                state=self._ocp.args.PyTreeSave(state), record=self._ocp.args.JsonSave(record)
            )
            self._manager.save(step, args=items, force=True)
            if jax.process_index() == 0:
                self._sealer.begin(self.folder / str(step))
        except Exception as error:  # orbax wraps I/O errors in types of its own
            raise self._not_saved(step, error) from error

    def _check_space(self, state: Any) -> None:
        """Fail before writing where the state cannot fit."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        total, _, free = shutil.disk_usage(self.folder)
        if jax.process_count() == 1 and total and free < needed:  # 0: it has no limit
            raise OSError(
                f"no space left: it needs about {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            )

    def wait(self) -> None:
        """Wait until what was started is on disk."""
        if "_manager" not in vars(self):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_saved(self._manager.latest_step() or 0, error) from error
        finally:
            self._sealer.end()

    def settle(self) -> None:
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

    def check(self, step: int) -> None:
        """Raise CheckpointError if the files of a checkpoint are not those that were saved."""
        if found := problem(self.folder / str(step)):
            raise self._damaged(step, ValueError(found))

    def read_record(self, step: int) -> dict[str, Any]:
        """Read the JSON record of a checkpoint."""
        try:
            items = self._manager.restore(
                step, args=self._ocp.args.Composite(record=self._ocp.args.JsonRestore())
            )
        except Exception as error:
            raise self._damaged(step, error) from error
        return dict(items["record"])

    def restore(self, step: int, abstract: Any) -> Any:
        """Read the state of a checkpoint into the shapes and shardings of ``abstract``."""
        try:
            how = self._ocp.checkpoint_utils.construct_restore_args(abstract)
            wanted = self._ocp.args.PyTreeRestore(abstract, restore_args=how)
            args = self._ocp.args.Composite(state=wanted)
            leaves, tree = jax.tree.flatten(self._manager.restore(step, args=args)["state"])
        except Exception as error:
            raise self._damaged(step, error) from error
        # Orbax's arrays may share buffers with the file cache; the step donates its input. One by
        # one, so that the state is not there twice.
        for place, leaf in enumerate(leaves):
            leaves[place] = leaf.copy()
        return jax.tree.unflatten(tree, leaves)

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder / str(step)} cannot be restored ({first_line(error)}): "
            "it is damaged, or belongs to another model; give an earlier one with "
            "--resume_from_checkpoint, or start anew with --overwrite_output_dir"
        )

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        kept = self.steps()
        return CheckpointError(
            f"could not save the checkpoint of step {step} to {self.folder} ({first_line(error)}); "
            + (f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no earlier one")
            + ": free some space and run the same command again to go on"
        )


@functools.cache  # hooks are the process's
def _quiet_late_callbacks() -> None:
    """Keep tensorstore from printing a traceback a file when a save has failed already.

    Its threads report to an event loop that orbax has closed by then; the failure itself is raised.
    """
    raised, ignored = sys.excepthook, sys.unraisablehook  # it comes by either

    def late(error: BaseException | None) -> bool:
        return type(error) is RuntimeError and str(error) == "Event loop is closed"

    def on_raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not late(error):
            raised(kind, error, trace)

    def on_ignored(found: Any) -> None:
        if not late(found.exc_value):
            ignored(found)

    sys.excepthook, sys.unraisablehook = on_raised, on_ignored


def set_damaged_aside(output_dir: Path) -> None:
    """Move the newest checkpoints out of the way while they are damaged, and say so.

    They stay beside ``checkpoints`` as ``checkpoint-<step>-damaged``: the steps after the last
    whole one are done, and saved, anew. Nothing is moved where none is whole.

    Raises:
        CheckpointError: every checkpoint is damaged.
    """
    folder = output_dir / FOLDER
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit() and p.is_dir())
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        found = problem(folder / str(step))
        if not found:
            break
        damaged[step] = found
    listing = "; ".join(f"{folder / str(step)}: {text}" for step, text in damaged.items())
    if damaged and len(damaged) == len(steps):
        raise CheckpointError(
            f"no checkpoint can be restored ({listing}): restore one from a copy, or start anew "
            "with --overwrite_output_dir, which keeps what is there"
        )
    for step in damaged:
        target = output_dir / f"checkpoint-{step}-damaged"
        count = len(list(output_dir.glob(f"{target.name}*")))
        os.rename(folder / str(step), target.with_name(f"{target.name}-{count + 1}")
                  if count else target)  # fmt: skip
    if damaged:
        logger.warning(
            "damaged: %s; kept as %s. The run goes on from step %d, the newest whole one",
            listing, ", ".join(f"checkpoint-{step}-damaged" for step in damaged),
            steps[len(steps) - len(damaged) - 1],
        )  # fmt: skip


def find(path: str | Path) -> tuple[Path, int | None]:
    """Interpret ``--resume_from_checkpoint``: an output directory, or one checkpoint in it."""
    path = Path(path)
    if path.name.isdigit() and path.parent.name == FOLDER:
        if not path.is_dir():
            raise CheckpointError(f"--resume_from_checkpoint {path} does not exist")
        return path.parent.parent, int(path.name)
    if not (path / FOLDER).is_dir():
        raise CheckpointError(
            f"--resume_from_checkpoint {path} holds no checkpoints: give an output directory or "
            f"<output_dir>/{FOLDER}/<step>"
        )
    return path, None


@dataclasses.dataclass
class Progress:
    """Where the run stands; saved with every checkpoint and restored from it."""

    step: int = 0
    tokens_seen: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    global_batch_size: int = 0
    seconds: float = 0.0
    stream: Any = None
    windows: dict[str, Any] | None = None  # how rows are cut, see `keep_windows`
    collections: dict[str, Any] | None = None  # what is beside the parameters, and by which recipe


def progress_of(checkpoints: Checkpointer, step: int) -> Progress:
    """Read where the run stood at a checkpoint.

    Raises:
        CheckpointError: the record is damaged, or another program's.
    """
    record = checkpoints.read_record(step)
    kinds = {"step": int, "tokens_seen": int, "global_batch_size": int, "seconds": int | float,
             "best_metric": int | float | None, "best_step": int | None,
             "windows": dict | None, "collections": dict | None}  # fmt: skip
    unknown = record.keys() - {entry.name for entry in dataclasses.fields(Progress)}
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name, 0), kind)
             and not (name in ("windows", "collections") and name not in record)]  # fmt: skip
    if unknown or wrong or record.get("step", step) != step:
        names = ", ".join(sorted({*map(str, unknown), *wrong})) or "step"
        raise CheckpointError(
            f"the checkpoint {checkpoints.folder / str(step)} has a record that no run wrote "
            f"({names}): it is damaged; give an earlier one with --resume_from_checkpoint"
        )
    return Progress(**record)
