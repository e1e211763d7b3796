"""Where a run stands, and which checkpoint it goes on from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

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
        loop.progress = Progress(**checkpoints.read_record(loop.restore_step))
