"""The length penalties of beam search, compared with an exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from transformers import GenerationConfig, T5Config

from hfseq import FlaxT5ForConditionalGeneration
from hfseq.errors import UsageError
from tests.generation import families
from tests.support.tiers import first

VOCAB, END, ALLOWED = 120, 1, (1, 7, 8, 9)
LONGEST = 4


@pytest.fixture(scope="module")
def model():
    """A model in whose first steps the end token is sometimes likely and sometimes not."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=20,
        num_layers=1,
        num_heads=4,
        initializer_factor=4.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=END,
    )
    return FlaxT5ForConditionalGeneration(config, seed=3)


def divisor(penalty_type: str, length: int, penalty: float) -> float:
    return (length if penalty_type == "transformers" else (5 + length) / 6) ** penalty


def everything(
    model, ids, penalty_type: str, penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Scores every sequence of allowed tokens up to the maximum length, best first."""
    other_tokens = [token for token in ALLOWED if token != END]
    scored = []
    for length in range(1, LONGEST + 1):
        ends = [END] if length < LONGEST else ALLOWED
        bodies = np.array(
            [(*b, e) for b in itertools.product(other_tokens, repeat=length - 1) for e in ends]
        )
        decoder_inputs = np.concatenate([np.zeros((len(bodies), 1), int), bodies[:, :-1]], axis=1)
        logits = np.asarray(
            model(np.repeat(ids, len(bodies), axis=0), decoder_input_ids=decoder_inputs).logits,
            np.float64,
        )
        logits -= logits.max(-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        sums = np.take_along_axis(logs, bodies[:, :, None], axis=2)[:, :, 0].sum(1)
        scores = sums / divisor(penalty_type, length, penalty)
        scored += zip(scores, map(tuple, bodies), strict=True)
    return sorted(scored, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("penalty_type", ["gnmt", "transformers"])
def test_exhaustive_beams_find_the_best(model, penalty_type, penalty):
    """With ``early_stopping="never"``, and always with GNMT's penalty, the search is exhaustive."""
    stop = {} if penalty_type == "gnmt" else {"early_stopping": "never"}
    forbidden = [token for token in range(VOCAB) if token not in ALLOWED]
    for seed in range(2):
        ids = families.prompts(1, 5, seed)
        expected = everything(model, ids, penalty_type, penalty)[:6]
        result = model.generate(
            ids,
            num_beams=VOCAB,
            num_return_sequences=6,
            max_new_tokens=LONGEST,
            suppress_tokens=forbidden,
            length_penalty=penalty,
            length_penalty_type=penalty_type,
            **stop,
        )
        rows = np.asarray(result.sequences)[:, 1:]
        for row, score, (best, tokens) in zip(rows, result.sequences_scores, expected, strict=True):
            assert tuple(row) == (*tokens, *[0] * (LONGEST - len(tokens)))
            assert float(score) == pytest.approx(best, rel=1e-5)


@pytest.mark.slow
def test_length_penalty_changes_the_best_beam(model):
    """Without a change the comparison above would not depend on the penalty."""
    best = {
        everything(model, families.prompts(1, 5, seed), penalty_type, penalty)[0][1]
        for seed in range(2)
        for penalty_type in ("gnmt", "transformers")
        for penalty in (0.0, 2.0)
    }
    assert len(best) > 1


def test_it_comes_from_a_generation_config_too(model, tmp_path):
    ids, options = families.prompts(2, 5), {"num_beams": 3, "max_new_tokens": 6}
    config = GenerationConfig(num_beams=3, length_penalty_type="gnmt", length_penalty=0.6)
    config.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    by_file = model.generate(ids, generation_config=read, **options)
    by_name = model.generate(ids, length_penalty_type="gnmt", length_penalty=0.6, **options)
    other = model.generate(ids, length_penalty=0.6, **options)
    np.testing.assert_array_equal(by_file.scores, by_name.scores)
    assert not np.allclose(other.scores, by_name.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty_type": "wmt"}, "length_penalty_type='wmt' must be \"transformers\" or"),
        ({"length_penalty": "0.6"}, "length_penalty='0.6' must be a number"),
    ],
)
def test_invalid_length_penalties_are_rejected(model, options, message):
    with pytest.raises(UsageError, match=message):
        model.generate(families.prompts(1, 5), num_beams=2, max_new_tokens=4, **options)


@pytest.mark.parametrize("penalty_type", first(["gnmt", "transformers"], "transformers"))
def test_n_best_come_in_order_with_their_scores(model, penalty_type):
    output = model.generate(
        families.prompts(3, 5),
        num_beams=5,
        num_return_sequences=4,
        max_new_tokens=6,
        length_penalty=0.8,
        length_penalty_type=penalty_type,
    )
    scores = np.asarray(output.sequences_scores).reshape(3, 4)
    assert output.sequences.shape[0] == 12 and (np.diff(scores, axis=1) <= 0).all()
    rows = np.asarray(output.sequences).reshape(3, 4, -1)
    assert all(len({tuple(row) for row in group}) == 4 for group in rows)
