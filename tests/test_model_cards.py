"""The released cards say what their logs say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

CARDS = sorted((Path(__file__).parents[1] / "model_cards").glob("*/README.md"))


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_the_numbers_of_a_card_are_those_of_its_log(card: Path) -> None:
    records = list(map(json.loads, (card.parent / "metrics.jsonl").read_text().splitlines()))
    last = {name: value for record in records for name, value in record.items()}
    results = ModelCard.load(card).data.eval_results
    assert results and {result.metric_type for result in results} >= {"loss", "accuracy"}
    for result in results:
        assert result.metric_value == last[f"eval_{result.metric_type}"]
    steps = re.search(r"\| Steps \| ([\d,]+) \|", card.read_text())
    assert steps and int(steps[1].replace(",", "")) == last["step"]
    assert (card.parent / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_a_card_gives_its_command_without_paths_of_a_machine(card: Path) -> None:
    text = card.read_text()
    assert "run_mlm_flax.py" in text and "$DATA" in text
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", text)


def test_the_norwegian_roberta_is_two_nats_below_the_unigram_entropy() -> None:
    card = next(path for path in CARDS if path.parent.name == "norwegian-laws-roberta")
    results = ModelCard.load(card).data.eval_results
    loss = next(r.metric_value for r in results if r.metric_type == "loss")
    assert loss <= 6.538 - 2.0  # the entropy of the validation tokens, computed in the card
