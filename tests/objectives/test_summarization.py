"""Summarization: errors before training starts."""

from __future__ import annotations

import pytest

from hfseq.errors import UsageError
from hfseq.objectives.translation import Summarization
from hfseq.training.arguments import parse


def test_missing_texts_are_rejected():
    objective = Summarization.__new__(Summarization)
    objective.arguments = parse(["--output_dir", "out"], objective="summarization").data
    with pytest.raises(UsageError, match="no data: .*--train_file or --dataset_name"):
        objective.setup()


def test_cards_name_the_task():
    assert Summarization.pipeline_tag == "summarization"
