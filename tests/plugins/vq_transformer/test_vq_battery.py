"""The battery that every architecture passes, on the VQ Transformer's kinds of heads."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from tests.plugins.vq_transformer import vq_cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "tasks"),
    [
        ("mqa", ["ForCausalLM"]),
        ("shga", None),
        ("gqa", ["ForCausalLM"]),
    ],
)
def test_the_battery(head, tasks):
    # Other tokens for one: bfloat16 rounds a key of theirs, which lies between two codes, to the
    # other code, and what attends to it is another number.
    words = 26 if head == "gqa" else 24
    config = vq_cases.config(head, vocab_size=words, num_hidden_layers=2, residual_dropout=0.1)
    # The gradient of the one scale is a sum over all places: 6.14252 to 6.14261, by the mesh. Its
    # gradients on meshes are compared in test_vq_sharding.py.
    skip = {"devices": "a sum that each mesh rounds in its own way"} if head == "gqa" else None
    report = check_architecture("vq_transformer", config, heads=tasks, torch=False, skip=skip)
    assert not report.failed
