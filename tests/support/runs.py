"""Short training runs in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

from hfseq.training import run as training_run
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
    learning_curve: bool = False,
) -> Trained:
    """Trains with these flags in this process, and returns the result.

    Args:
        argv: The flags.
        objective: The objective.
        devices: The number of devices. `None` selects the default devices.
        callbacks: The callbacks of the run.
        learning_curve: Whether to draw the learning curve, which takes as long as many steps.
    """
    import jax

    began = RecordStartStep()
    selected_devices = None if devices is None else jax.devices()[:devices]
    arguments = parse(list(argv), objective=objective)
    patch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not learning_curve:
        patch = mock.patch.object(training_run, "draw_curve", return_value="")
    with patch:
        result = main(arguments, objective, callbacks=[*callbacks, began], devices=selected_devices)
    return Trained(**vars(result), start_step=began.step)
