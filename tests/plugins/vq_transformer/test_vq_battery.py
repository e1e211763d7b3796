"""The battery that every architecture passes, on the VQ Transformer's kinds of heads."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from tests.plugins.vq_transformer import vq_cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "tasks"),
    [
        pytest.param("mqa", ["ForCausalLM"], marks=pytest.mark.slow),
        pytest.param("shga", None, marks=pytest.mark.slow),
        pytest.param("gqa", ["ForCausalLM"], marks=pytest.mark.slow),
    ],
)
def test_the_battery(head, tasks):
    config = vq_cases.config(head, vocab_size=24, num_hidden_layers=2, residual_dropout=0.1)
    report = check_architecture("vq_transformer", config, heads=tasks, torch=False)
    assert not report.failed
