"""Summarization: errors before training starts."""

from __future__ import annotations

import pytest

from hfseq.errors import UsageError
from hfseq.objectives.translation import Summarization
from hfseq.training.arguments import parse


def test_without_texts_nothing_is_summarised_and_no_translator_trained():
    objective = Summarization.__new__(Summarization)
    objective.arguments = parse(["--output_dir", "out"], objective="summarization").data
    with pytest.raises(UsageError, match="no data: .*--train_file or --dataset_name"):
        objective.setup()


def test_its_cards_say_what_its_models_are_for():
    assert Summarization.pipeline_tag == "summarization"
