"""Prompts of different lengths in one batch: padding on either side has no effect."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation import families
from tests.support.tiers import first

PROMPTS = [families.prompts(1, length, seed=length)[0] for length in (7, 3, 5, 1)]
OPTIONS = {"greedy": {}, "beam": {"num_beams": 2, "repetition_penalty": 1.3}}


def padded(side: str, width: int = 7) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(PROMPTS), width), families.PAD, np.int32)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        columns = slice(width - len(prompt), width) if side == "left" else slice(len(prompt))
        ids[row, columns], mask[row, columns] = prompt, 1
    return ids, mask


def new_tokens(model, ids, mask=None, **options):
    options = {"max_new_tokens": 6, "eos_token_id": None, **options}
    output = model.generate(ids, attention_mask=mask, **options)
    return np.asarray(output.sequences)[:, ids.shape[1] :]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", first(["llama", "gpt2"], "gpt2"))
def test_ragged_rows_match_single_rows(family, name):
    model = families.model(family)
    alone = [new_tokens(model, prompt[None], **OPTIONS[name])[0] for prompt in PROMPTS]
    for side in ("left", "right"):
        ids, mask = padded(side)
        for given_mask in (mask, None):  # without a mask, it is inferred from the padding
            result = new_tokens(model, ids, given_mask, pad_token_id=families.PAD, **OPTIONS[name])
            assert (result == alone).all(), side


def test_right_padded_prompts_come_back_padded_on_the_left():
    ids, mask = padded("right")
    sequences = families.model("llama").generate(ids, attention_mask=mask, max_length=9).sequences
    assert (np.asarray(sequences)[:, :7] == padded("left")[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", families.PAIRS)
def test_encoder_inputs_accept_padding_on_either_side(family):
    model = families.model(family)
    options = {"max_new_tokens": 6, "eos_token_id": None}
    alone = [np.asarray(model.generate(p[None], **options).sequences)[0] for p in PROMPTS]
    sides = ("right",) if family == "bart" else ("left", "right")  # BART has absolute positions
    for side in sides:
        ids, mask = padded(side)
        result = model.generate(ids, attention_mask=mask, **options).sequences
        assert (np.asarray(result) == alone).all()


@pytest.mark.slow
def test_ragged_beginnings_of_the_decoder():
    model, source = families.model("bart"), families.prompts(4, 6)
    ids, mask = padded("right")
    result = model.generate(
        source,
        decoder_input_ids=ids,
        decoder_attention_mask=mask,
        max_new_tokens=5,
        eos_token_id=None,
    ).sequences
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(
            source[row][None], decoder_input_ids=prompt[None], max_new_tokens=5, eos_token_id=None
        ).sequences
        assert (np.asarray(result)[row, -5:] == np.asarray(alone)[0, -5:]).all()


def test_mask_is_inferred_if_pad_is_not_eos():
    model = families.model("llama")
    ids, mask = padded("left")
    expected = new_tokens(model, ids, mask, eos_token_id=families.EOS)
    assert (new_tokens(model, ids, eos_token_id=families.EOS) == expected).all()
    visible = new_tokens(model, ids, np.ones_like(mask), eos_token_id=families.PAD)
    assert (new_tokens(model, ids, eos_token_id=families.PAD) == visible).all()


def test_empty_prompt_begins_with_the_begin_token():
    model = families.model("llama")
    expected = new_tokens(model, np.array([[families.BOS]]))
    assert (new_tokens(model, np.zeros((1, 0), np.int32))[:, 1:] == expected).all()
    assert (
        np.asarray(model.generate(max_new_tokens=6, eos_token_id=None).sequences)[:, 1:] == expected
    ).all()
