"""Short runs of the real training, in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hfseq.training.arguments import parse
from hfseq.training.callbacks import Callback, StepInfo
from hfseq.training.run import Result, main


@dataclasses.dataclass(frozen=True)
class Trained(Result):
    """What a run left, and the step that it began behind (None where it trained nothing)."""

    start_step: int | None


class RecordStartStep(Callback):
    """Notes the step that a run goes on from."""

    step: int | None = None

    def on_train_begin(self, info: StepInfo) -> None:
        self.step = info.progress.step


def train(
    argv: Sequence[str],
    objective: str = "mlm",
    devices: int | None = 8,
    callbacks: Sequence[Any] = (),
) -> Trained:
    """Train with these flags on the first so many devices (None: without choosing any)."""
    import jax

    began = RecordStartStep()
    chosen = None if devices is None else jax.devices()[:devices]
    arguments = parse(list(argv), objective=objective)
    result = main(arguments, objective, callbacks=[*callbacks, began], devices=chosen)
    return Trained(**vars(result), start_step=began.step)
