"""The compiled programs of a run: the training step, and the calibration before the first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jax

from hfseq.training import state as states

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

logger = logging.getLogger(__name__)


def compile_step(loop: Loop) -> Any:
    """Return ``step(state, batch)``, jitted with the run's shardings; the state is donated."""
    return _compiled(loop, calibrate=False)


def calibrate(loop: Loop, batch: Any) -> None:
    """Measure what the model's products need to know of ``batch`` before its first step (FP8).

    A forward and a backward pass of which nothing else is kept; models without such collections
    need none.
    """
    if not loop.model.overwritten_extra:
        return
    logger.info("measuring the FP8 scales on the first batch")
    loop.state, _ = _compiled(loop, calibrate=True)(loop.state, batch)


def _compiled(loop: Loop, calibrate: bool) -> Any:
    training = loop.training
    step = states.make_step(
        loop.objective, loop.model, loop.optimizer, training.seed,
        training.on_non_finite == "skip", loop.memory(), calibrate,
    )  # fmt: skip
    places = (loop.state_shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=places, in_shardings=places)
