"""Dropping finished rows from the batch does not change the result."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hfseq.generation import generate
from tests.generation import families
from tests.generation.test_compilation import compilations

#: Many end tokens and no repeated tokens, so that rows end at very different steps.
ENDS = list(range(families.EOS, families.VOCAB, 5))
MODES = {
    "greedy": {},
    "forbidden": {"min_new_tokens": 3, "bad_words_ids": [[7]], "repetition_penalty": 1.2},
    "beams": {"num_beams": 3},
    "early": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2},
    "gnmt": {"num_beams": 4, "length_penalty_type": "gnmt", "num_return_sequences": 4},
    "encoder": {"num_beams": 2, "encoder_repetition_penalty": 1.5},
}
SHAPE = {"max_new_tokens": 24, "eos_token_id": ENDS, "no_repeat_ngram_size": 1}


def inputs(family: str, rows: int, seed: int = 0) -> dict:
    """Returns rows of different lengths."""
    ids = families.prompts(rows, 7, seed)
    mask = families.mask(rows, 7, "right" if family in families.PAIRS else "left", seed)
    return {"input_ids": np.where(mask == 1, ids, families.PAD), "attention_mask": mask}


def moves(caplog) -> list[int]:
    """Returns how many rows continued after each compaction."""
    return [
        int(record.message.split()[0])
        for record in caplog.records
        if "rows continue" in record.message
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("bart", mode) for mode in MODES),
        *(("t5", mode) for mode in ("greedy", "beams")),
    ],
)
def test_results_are_those_of_the_plain_loop(family, mode, caplog):
    model, options = families.model(family), {**SHAPE, **MODES[mode]}
    arguments = inputs(family, 18)
    plain = model.generate(**arguments, **options)
    with caplog.at_level(logging.DEBUG, logger=generate.__name__):
        result = model.generate(**arguments, **options, compact_finished=True)
    assert type(result) is type(plain) and result.keys() == plain.keys()
    np.testing.assert_array_equal(result.sequences, plain.sequences)
    if "scores" in plain:
        np.testing.assert_allclose(result.scores, plain.scores, rtol=1e-5, atol=1e-5)
    assert moves(caplog), "no row left: the test shows nothing"


@pytest.mark.slow
def test_decoder_rows_are_compacted(caplog):
    model, arguments = families.model("llama"), inputs("llama", 20)
    plain = model.generate(**arguments, **SHAPE)
    with caplog.at_level(logging.DEBUG, logger=generate.__name__):
        result = model.generate(**arguments, **SHAPE, compact_finished=True)
    np.testing.assert_array_equal(result.sequences, plain.sequences)
    assert moves(caplog)


@pytest.mark.slow
def test_compaction_halves_down_to_the_smallest(caplog):
    """After each compaction, at most as many rows continue as the next batch size allows."""
    model, arguments = families.model("bart"), inputs("bart", 32)
    with caplog.at_level(logging.DEBUG, logger=generate.__name__):
        model.generate(**arguments, **SHAPE, compact_finished=True)
    sizes = [32, 16, 8]
    logged_sizes = [tuple(map(int, r.message.split()[::2][:2])) for r in caplog.records]
    assert [of for _, of in logged_sizes] == sizes[: len(logged_sizes)] and len(logged_sizes) >= 2
    assert all(left <= generate.next_batch_size(of) for left, of in logged_sizes)


@pytest.mark.slow
def test_programs_are_as_many_as_halvings():
    model, options = families.fresh_model("bart"), {**SHAPE, "compact_finished": True}
    for seed in range(3):
        model.generate(**inputs("bart", 32, seed), **options)
    (programs,) = vars(model)["_generation_programs"].values()
    begin, go_on, shrink = (program._cache_size() for program in programs)
    assert begin == 1 and go_on <= 3 and shrink <= 2
    with compilations() as compiled:
        for seed in range(3):
            model.generate(**inputs("bart", 32, seed), **options)
    assert compiled == []


@pytest.mark.slow
def test_small_batches_are_not_compacted(caplog):
    model = families.model("bart")
    with caplog.at_level(logging.DEBUG, logger=generate.__name__):
        model.generate(**inputs("bart", 8), **SHAPE, compact_finished=True)
    assert not moves(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"do_sample": True}, {"output_scores": True}])
def test_unsupported_searches_are_not_compacted(options, caplog):
    model, arguments = families.model("bart"), inputs("bart", 20)
    plain = model.generate(**arguments, **SHAPE, **options)
    with caplog.at_level(logging.DEBUG, logger=generate.__name__):
        result = model.generate(**arguments, **SHAPE, **options, compact_finished=True)
    np.testing.assert_array_equal(result.sequences, plain.sequences)
    assert not moves(caplog)
