"""Short training runs in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hfseq.training.arguments import parse
from hfseq.training.callbacks import Callback, StepInfo
from hfseq.training.run import Result, main


@dataclasses.dataclass(frozen=True)
class Trained(Result):
    """The result of a run, and the step that it started from (`None` if it did not train)."""

    start_step: int | None


class RecordStartStep(Callback):
    """Records the step that a run starts from."""

    step: int | None = None

    def on_train_begin(self, info: StepInfo) -> None:
        self.step = info.progress.step


def train(
    argv: Sequence[str],
    objective: str = "mlm",
    devices: int | None = 8,
    callbacks: Sequence[Any] = (),
) -> Trained:
    """Trains with these flags on the first `devices` devices (`None`: the default devices)."""
    import jax

    began = RecordStartStep()
    selected_devices = None if devices is None else jax.devices()[:devices]
    arguments = parse(list(argv), objective=objective)
    result = main(arguments, objective, callbacks=[*callbacks, began], devices=selected_devices)
    return Trained(**vars(result), start_step=began.step)
