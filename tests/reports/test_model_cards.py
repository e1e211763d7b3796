"""The released model cards agree with their logs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

CARDS = sorted((Path(__file__).parents[2] / "model_cards").glob("*/README.md"))


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_the_numbers_of_a_card_are_those_of_its_log(card: Path) -> None:
    records = list(map(json.loads, (card.parent / "metrics.jsonl").read_text().splitlines()))
    last = {name: value for record in records for name, value in record.items()}
    results = ModelCard.load(card).data.eval_results
    kinds = {result.metric_type for result in results or ()}
    metrics = {"accuracy", "f1", "wer", "rewards/margins", "ndcg_at_10"}
    assert "loss" in kinds and kinds & metrics
    for result in results:
        prefix = "predict" if result.dataset_split == "test" else "eval"
        assert result.metric_value == last[f"{prefix}_{result.metric_type}"]
    steps = re.search(r"\| Steps \| ([\d,]+) \|", card.read_text())
    assert steps and int(steps[1].replace(",", "")) == last["step"]
    assert (card.parent / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_a_card_gives_its_command_without_paths_of_a_machine(card: Path) -> None:
    text = card.read_text()
    assert re.search(r"run_\w+_flax.py", text)
    assert re.search(
        r"\$DATA|without any data|tutorial\]\([^)]*\) that\s+generates its|synthesized", text
    )
    for path in card.parent.iterdir():
        if path.suffix != ".png":
            match = re.search(r"(?<![\w.])/(home|root|tmp|work)/\S*", path.read_text())
            assert not match, (path.name, match)


@pytest.mark.parametrize(
    ("name", "entropy", "nats"),
    [
        ("norwegian-laws-roberta", 6.538, 2.0),
        ("norwegian-laws-gpt2", 6.538, 2.0),
        ("norwegian-laws-bart", 6.539, 2.0),
        ("norwegian-laws-t5", 6.384, 1.0),
    ],
)
def test_the_norwegian_models_are_below_the_unigram_entropy(name, entropy, nats) -> None:
    card = next(path for path in CARDS if path.parent.name == name)
    results = ModelCard.load(card).data.eval_results
    loss = next(r.metric_value for r in results if r.metric_type == "loss")
    assert loss <= entropy - nats  # of the validation tokens, computed as the card says
    assert str(entropy) in card.read_text()


@pytest.mark.parametrize(("name", "baseline"), [("npk-nb-nn", 44.2), ("tatoeba-en-es", 0.0)])
def test_the_translators_are_above_a_copy_of_the_source(name, baseline) -> None:
    card = next(path for path in CARDS if path.parent.name == name)
    scores = [
        result.metric_value
        for result in ModelCard.load(card).data.eval_results
        if (result.metric_type, result.dataset_split) == ("bleu", "test")
    ]
    assert scores and scores[0] > baseline + 10
    assert not baseline or str(baseline) in card.read_text()


TRANSLATORS = ["npk-nb-nn", "tatoeba-en-es"]


@pytest.mark.parametrize(
    "name", ["norwegian-laws-gpt2", "norwegian-laws-bart", "norwegian-laws-t5", *TRANSLATORS]
)
def test_the_same_small_training_in_pytorch_agrees(name) -> None:
    card = next(path for path in CARDS if path.parent.name == name)
    comparison = json.loads((card.parent / "pytorch_comparison.json").read_text())
    assert comparison["parity_steps"] == 100 and comparison["max_difference"] <= 1e-3
    assert (
        len(comparison["pytorch"]) == 3
        and f"{comparison['max_difference']:.1e}" in card.read_text()
    )
    finals = [other["final_loss"] for other in comparison["pytorch"]]
    lowest, highest = min(finals), max(finals)
    assert lowest - 1e-3 <= comparison["final_loss"] <= highest + 1e-3
