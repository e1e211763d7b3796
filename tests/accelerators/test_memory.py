"""What a step of base width needs on an H200 beside its state, where all scores would be kept."""

from __future__ import annotations

import re

import pytest

from hfseq.cli.plan.options import Options
from hfseq.cli.plan.run import abstract_batch, build
from hfseq.nn.context import RowGuarantees
from hfseq.training import aot

#: MiB that the explicit form took for the same step, with attention dropout 0.1.
EXPLICIT = 821


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.6), (0.1, 0.7)])
def test_two_layers_of_roberta_keep_no_scores(rate, share):
    if reason := aot.unavailable_reason("h200"):
        pytest.skip(reason)
    devices = aot.describe("h200", 1)
    sizes = "num_hidden_layers=2,vocab_size=50265,max_position_embeddings=514"
    options = Options(
        config="roberta",
        devices="h200:1",
        length=512,
        per_device_train_batch_size=8,
        precision="bfloat16",
        config_overrides=f"{sizes},attention_probs_dropout_prob={rate}",
    )
    run = build(options, devices)
    run.objective.row_guarantees = RowGuarantees(max_runs=16)
    program = aot.compile_for(
        devices[0], run.step_function(), run.abstract_state(), run.frozen, abstract_batch(run, 8)
    )
    assert program.memory_analysis().temp_size_in_bytes <= share * EXPLICIT * 2**20
    shapes = re.findall(r"\w+\[([\d,]+)\]", program.as_text() or "")
    assert not [shape for shape in shapes if shape.split(",").count("512") > 1]
