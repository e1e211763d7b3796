"""The collator classes of the version 4 scripts, used in a custom training loop."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.objectives.collators import FlaxDataCollatorForBartDenoisingLM, FlaxDataCollatorForT5MLM
from hfseq.objectives.span_mlm import compute_input_and_target_lengths
from tests.data.samples import make_texts


def t5_collator(tokenizer, length=32, seed=0):
    raw, targets = compute_input_and_target_lengths(length, 0.15, 3.0)
    return raw, FlaxDataCollatorForT5MLM(
        tokenizer=tokenizer,
        noise_density=0.15,
        mean_noise_span_length=3.0,
        input_length=length,
        target_length=targets,
        pad_token_id=0,
        decoder_start_token_id=0,
        seed=seed,
    )


def examples_of(count, length, high=70):
    rows = np.random.default_rng(0).integers(5, high, (count, length))
    return [{"input_ids": row.tolist()} for row in rows]


def test_t5_rows_have_the_lengths_computed_and_hold_the_text(tokenizer_of):
    tokenizer = tokenizer_of("t5")
    raw, collator = t5_collator(tokenizer)
    examples = examples_of(50, raw)
    batch = collator(examples)
    assert batch["input_ids"].shape == (50, 32)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (50, collator.target_length)
    zero = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    assert (batch["labels"][:, 0] == zero).all() and (batch["input_ids"] == zero).sum() == 50
    for row, example in enumerate(examples):
        visible = [*batch["input_ids"][row], *batch["labels"][row]]
        text = sorted(t for t in visible if t not in collator.sentinels and t != 1)
        assert text == sorted(example["input_ids"])
    assert not np.array_equal(batch["input_ids"], collator(examples)["input_ids"])  # dynamic
    again = t5_collator(tokenizer)[1](examples)
    np.testing.assert_array_equal(batch["input_ids"], again["input_ids"])


def test_t5_noise_density_is_exact(tokenizer_of):
    raw, collator = t5_collator(tokenizer_of("t5"))
    mask = np.stack([collator.random_spans_noise_mask(raw) for _ in range(200)])
    assert mask.dtype == bool and set(mask.sum(axis=1)) == {round(raw * 0.15)}
    assert 0 < mask[:, 0].sum() < 60 and 0 < mask[:, -1].sum() < 60  # v4: never, always


def test_t5_examples_of_another_length_are_refused(tokenizer_of):
    raw, collator = t5_collator(tokenizer_of("t5"))
    with pytest.raises(ValueError, match="`input_ids` are incorrectly preprocessed"):
        collator(examples_of(2, raw - 10))
    raw, collator = t5_collator(tokenizer_of("roberta"))
    with pytest.raises(ValueError, match="has 0 sentinels"):
        collator(examples_of(2, raw))


@pytest.fixture
def bart_rows(tokenizer_of):
    tokenizer = tokenizer_of("bart")
    texts = [" ".join(f"{t.capitalize()}." for t in make_texts(4, seed=s)) for s in range(40)]
    batch = tokenizer(texts, padding="max_length", truncation=True, max_length=160)
    return tokenizer, [{"input_ids": ids} for ids in batch["input_ids"]]


def test_bart_rows_are_permuted_and_infilled(bart_rows):
    tokenizer, examples = bart_rows
    ids = np.array([example["input_ids"] for example in examples])
    batch = FlaxDataCollatorForBartDenoisingLM(tokenizer, decoder_start_token_id=2, seed=0)(
        examples
    )
    assert {array.shape for array in batch.values()} == {ids.shape}
    np.testing.assert_array_equal(batch["labels"], np.where(ids == 1, -100, ids))
    np.testing.assert_array_equal(batch["decoder_input_ids"][:, 1:], ids[:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == 2).all()
    special = np.isin(batch["input_ids"], tokenizer.all_special_ids)
    remaining = (~special).sum() / (~np.isin(ids, tokenizer.all_special_ids)).sum()
    assert abs(1 - remaining - 0.3) < 0.01
    assert ((batch["input_ids"] != 1) == (batch["attention_mask"] == 1)).all()


def test_bart_accepts_pad_as_sentence_end(bart_rows):
    """Version 4's preprocessing marked sentence ends by pad tokens inside rows."""
    tokenizer, _ = bart_rows
    row = [0, 10, 11, 1, 12, 13, 14, 1, 15, 16, 1, 17, 18, 2, 1, 1]
    collator = FlaxDataCollatorForBartDenoisingLM(
        tokenizer, decoder_start_token_id=2, mask_ratio=0.0, seed=1
    )
    observed = {tuple(collator([{"input_ids": row}])["input_ids"][0].tolist()) for _ in range(40)}
    assert len(observed) > 10
    for actual in observed:
        assert actual[0] == 0 and actual[13:] == (2, 1, 1)
        for sentence in ((10, 11), (12, 13, 14), (15, 16), (17, 18)):
            position = actual.index(sentence[0])
            assert actual[position : position + len(sentence)] == sentence


def test_bart_needs_a_mask(tokenizer_of):
    with pytest.raises(ValueError, match="mask token or eos token"):
        FlaxDataCollatorForBartDenoisingLM(tokenizer_of("gpt2"), decoder_start_token_id=0)
