"""Where a run stands, and which checkpoint it goes on from."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax

from hfseq import trees
from hfseq.errors import CheckpointError, UsageError
from hfseq.training.checkpoints import Checkpoints, find

if TYPE_CHECKING:
    from hfseq.training.loop import Loop


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


def read_progress(loop: Loop) -> None:
    """Find the checkpoint to resume and read its record, before the batch size is settled.

    Sets ``loop.restore_from``, ``loop.restore_step`` (None: nothing to resume) and
    ``loop.progress``.
    """
    source, wanted = loop.training.resume_from_checkpoint, None
    loop.restore_step, checkpoints = None, loop.checkpoints
    if not loop.training.do_train:
        return
    if source:
        folder, wanted = find(source)
        if folder.absolute() != loop.folder.absolute():
            checkpoints = Checkpoints(folder, limit=None)
    loop.restore_from = checkpoints
    steps = checkpoints.steps()
    loop.restore_step = wanted if wanted is not None else (steps[-1] if steps else None)
    if loop.restore_step is not None:
        if source and jax.process_index() == 0:  # else `set_damaged_aside` has looked
            checkpoints.check(loop.restore_step)
        loop.progress = progress_of(checkpoints, loop.restore_step)
    _keep_collections(loop)


def progress_of(checkpoints: Checkpoints, step: int) -> Progress:
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


def _keep_collections(loop: Loop) -> None:
    """Record what the state holds beside parameters, which a run cannot change on its way."""
    sizes = {
        name: sum(math.prod(leaf.shape) for leaf in trees.flatten(tree).values())
        for name, tree in loop.model.extra_shape_tree.items()
    }
    own = {"precision": loop.model.precision.name, "sizes": sizes}
    before = loop.progress.collections
    if before is not None and before["sizes"] != sizes:
        raise UsageError(
            f"the checkpoint of step {loop.restore_step} was trained with --precision "
            f"{before['precision']} and holds {_listed(before['sizes'])}; with --precision "
            f"{own['precision']} and these flags it would hold {_listed(sizes)}. Give the flags of "
            f"the run; or begin another with its weights: --model_name_or_path "
            f"{loop.training.output_dir} and a new --output_dir"
        )
    loop.progress.collections = own


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} ({size} numbers)" for name, size in sizes.items()) or "no collections"


def keep_windows(loop: Loop) -> None:
    """Record how rows are cut into windows; the state in a checkpoint belongs to that cut.

    Raises:
        UsageError: the checkpoint to go on from was trained with another one.
    """
    plan, progress = loop.windows, loop.progress
    own = None if plan is None else {
        "update_length": plan.length, "state_reset": "never" if plan.streams else "sequence",
        "block_size": plan.length * plan.count, "global_batch_size": loop.batch_size,
    }  # fmt: skip
    if loop.restore_step is not None and own != progress.windows:
        raise UsageError(
            f"the checkpoint of step {loop.restore_step} was trained {_told(progress.windows)}, "
            f"and the flags say {_told(own)}: give the same flags, or another --output_dir"
        )
    progress.windows = own


def _told(windows: dict[str, Any] | None) -> str:
    if windows is None:
        return "without --update_length"
    return "with " + " ".join(f"--{name} {value}" for name, value in windows.items())
