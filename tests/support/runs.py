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
    """The result of a run, and the step at which it started.

    Attributes:
        start_step: The number of completed steps when training started. It is above 0 if the run
            resumed from a checkpoint, and `None` if the run did not train.
    """

    start_step: int | None


class RecordStartStep(Callback):
    """Records the number of completed steps when training starts."""

    step: int | None = None

    def on_train_begin(self, info: StepInfo) -> None:
        self.step = info.progress.step


def train(
    argv: Sequence[str],
    objective: str = "mlm",
    devices: int | None = 8,
    callbacks: Sequence[Any] = (),
) -> Trained:
    """Trains with these flags in this process, and returns the result.

    The run uses the first `devices` devices, or the default devices if `devices` is `None`.
    """
    import jax

    began = RecordStartStep()
    selected_devices = None if devices is None else jax.devices()[:devices]
    arguments = parse(list(argv), objective=objective)
    result = main(arguments, objective, callbacks=[*callbacks, began], devices=selected_devices)
    return Trained(**vars(result), start_step=began.step)
