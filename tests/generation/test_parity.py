"""Greedy and beam search generate PyTorch's tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.generation import families
from tests.support.tiers import first

torch = pytest.importorskip("torch")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "eos_token_id": [2, 7],
        "suppress_tokens": [9, 10],
    },
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "beams, early": {
        "num_beams": 3,
        "early_stopping": True,
        "length_penalty": 2.0,
        "eos_token_id": [2, 7, 11],
        "no_repeat_ngram_size": 3,
    },
    "beams, never": {
        "num_beams": 2,
        "early_stopping": "never",
        "length_penalty": 0.3,
        "min_length": 12,
        "num_return_sequences": 2,
        "forced_eos_token_id": 2,
    },
}
#: PyTorch may select either of two tokens whose scores differ by less than this.
TIE = 1e-5


def compare(family: str, options: dict[str, Any], ids: np.ndarray, mask: Any) -> int:
    """Generates with both models and returns the number of rows that differ because of ties."""
    ours, theirs = families.model_pair(family)
    options = {"max_new_tokens": 14, **options}
    mine = ours.generate(ids, attention_mask=mask, **options)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask),
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    result, target = np.asarray(mine.sequences), expected.sequences.numpy()
    prompt = 1 if family in families.PAIRS else ids.shape[1]
    target = pad_after_end(target, prompt, options.get("eos_token_id", families.EOS))
    assert (result[:, target.shape[1] :] == families.PAD).all()
    result = result[:, : target.shape[1]]
    different = np.flatnonzero((result != target).any(1))
    for row in different:
        gap = _gap(row, result[row], target[row], mine, expected)
        print(f"{family} {options} row {row}: gap {gap:.2e}\n  {result[row]}\n  {target[row]}")
        assert gap < TIE, f"row {row}: {result[row]} instead of {target[row]}"
    return len(different)


def pad_after_end(rows: np.ndarray, prompt: int, ends: Any) -> np.ndarray:
    """Pads after the end. PyTorch's beam search uses the end token if padding is 0."""
    ended = np.isin(rows, ends)
    ended[:, :prompt] = False
    return np.where(np.cumsum(ended, 1) - ended > 0, families.PAD, rows)


def _gap(row: int, result: np.ndarray, target: np.ndarray, mine: Any, expected: Any) -> float:
    """Returns the difference of PyTorch's scores of the two choices."""
    if getattr(expected, "sequences_scores", None) is not None:
        return abs(float(mine.scores[row]) - float(expected.sequences_scores[row]))
    position = int(np.flatnonzero(result != target)[0])
    prompt = len(target) - len(expected.scores)
    scores = expected.scores[position - prompt][row]
    return float(scores[target[position]] - scores[result[position]])


@pytest.mark.parametrize(
    ("family", "name"),
    first(
        itertools.product((*families.DECODERS, *families.PAIRS), CONFIGURATIONS),
        ("roberta", "greedy, penalties"),
        ("t5", "beams, early"),
    ),
)
def test_tokens_are_pytorchs(family, name):
    ids = families.prompts(8, 6, seed=len(name))
    mask = families.mask(8, 6, "right" if family in families.PAIRS else "left", seed=1)
    ids = np.where(mask == 1, ids, families.PAD)
    assert compare(family, CONFIGURATIONS[name], ids, mask) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", (*families.DECODERS, *families.PAIRS))
def test_tokens_are_pytorchs_on_200_prompts(family):
    side, ties, rows = "right" if family in families.PAIRS else "left", 0, 0
    for name, options in CONFIGURATIONS.items():
        for batch in range(5):
            ids = families.prompts(40, 9, seed=100 * batch + len(name))
            mask = families.mask(40, 9, side, seed=batch)
            ties += compare(family, options, np.where(mask == 1, ids, families.PAD), mask)
            rows += 40 * options.get("num_return_sequences", 1)
    assert ties <= rows / 100
