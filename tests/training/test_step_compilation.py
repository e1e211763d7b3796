"""A run compiles its step once. The scripts of Transformers 4 compiled theirs twice."""

from __future__ import annotations

import logging

import jax


def test_step_and_evaluation_are_compiled_once(train, caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train("once", devices=1, max_steps=4, eval_steps=2)
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA comp" in r.getMessage()]
    assert sum("jit(step)" in message for message in compiled) == 1
    assert sum("jit(evaluate)" in message for message in compiled) == 1
