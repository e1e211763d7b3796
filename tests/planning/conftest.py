"""Fixtures for plans, and for the short runs of the training tests that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hfseq.cli.plan.options import Options
from tests.training.conftest import corpus, flags, train  # noqa: F401

GPT2 = "n_embd=32,n_layer=1,n_head=4,n_positions=40,vocab_size=128,bos_token_id=0,eos_token_id=0"


@pytest.fixture
def options() -> Callable[..., Options]:
    """Returns a function that creates options for a tiny GPT-2 on eight devices."""

    def make(**changes: Any) -> Options:
        values = {
            "config": "gpt2",
            "config_overrides": GPT2,
            "devices": "h200:8",
            "length": 16,
            "precision": "float32",
            "per_device_train_batch_size": 2,
        }
        return Options(**(values | changes))

    return make
