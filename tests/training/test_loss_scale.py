"""Float16: loss scaling, so that gradients neither vanish nor overflow."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.training import state
from tests.training.conftest import losses


def test_only_float16_needs_a_scale():
    assert state.initial_loss_scale(jnp.bfloat16) is None and state.initial_loss_scale(None) is None
    assert float(state.initial_loss_scale(jnp.float16)["factor"]) == state.INITIAL_SCALE


def test_overflow_halves_and_patience_doubles():
    scale = state.initial_loss_scale(jnp.float16)
    scale = state.update_loss_scale(scale, jnp.array(True))
    assert float(scale["factor"]) == state.INITIAL_SCALE / 2 and int(scale["good_steps"]) == 0
    for _ in range(state.GROWTH_INTERVAL):
        scale = state.update_loss_scale(scale, jnp.array(False))
    assert float(scale["factor"]) == state.INITIAL_SCALE and int(scale["good_steps"]) == 0


@pytest.mark.parametrize(
    ("factor", "loss", "norm", "expected"),
    [(8, 1.0, np.inf, True), (8, 1.0, 1.0, False), (8, np.nan, np.inf, False), (1, 1.0, np.inf, 0)],
)
def test_overflow_with_finite_loss_is_attributed_to_the_scale(factor, loss, norm, expected):
    scale = {"factor": jnp.float32(factor), "good_steps": jnp.int32(0)}
    result = state.overflowed(scale, jnp.float32(loss), jnp.float32(norm))
    assert bool(result) == bool(expected)


@pytest.mark.slow
def test_float16_trains_as_float32_does_and_keeps_its_scale_with_the_checkpoint(train):
    exact = losses(train("float32", 1, do_train=True).folder)
    loop = train("float16", 1, dtype="float16", do_train=True)
    half = losses(loop.folder)
    assert half.keys() == exact.keys()
    for step, value in exact.items():
        assert half[step] == pytest.approx(value, rel=5e-3)
    scale = loop.state.loss_scale
    assert float(scale["factor"]) == state.INITIAL_SCALE and int(scale["good_steps"]) == 6


@pytest.mark.slow
def test_a_step_that_overflows_is_left_out_and_the_next_has_half_the_scale(train, monkeypatch):
    monkeypatch.setattr(state, "INITIAL_SCALE", 2.0**24)
    loop = train("run", 1, dtype="float16", do_train=True)
    result = losses(loop.folder)
    assert result[1] == pytest.approx(result[2], rel=1e-2)  # the first step changed nothing
    assert float(loop.state.loss_scale["factor"]) < 2.0**24
    assert np.isfinite(list(result.values())).all()
