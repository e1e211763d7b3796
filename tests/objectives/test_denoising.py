"""BART's objective in the training loop: row reconstruction and separation of documents."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hfseq.data.arguments import DenoisingArguments
from hfseq.data.batches import LineRows
from hfseq.errors import UsageError
from hfseq.objectives.denoising import Denoising
from tests.data.samples import make_texts
from tests.objectives.conftest import loss_of, numbers, rows_of, store_of


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("bart")


def bart_config(**changes):
    from transformers import BartConfig

    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    config = {"vocab_size": 400, "d_model": 32, "max_position_embeddings": 200, **sides}
    return BartConfig(**{**config, **changes})


def objective(tokenizer, config=None, **flags):
    return Denoising(DenoisingArguments(**flags), tokenizer, config or bart_config())


def documents(tokenizer, count, sentences=4):
    texts = iter(make_texts(count * sentences, seed=3))
    return [
        tokenizer(" ".join(f"{next(texts).capitalize()}." for _ in range(sentences)))["input_ids"]
        for _ in range(count)
    ]


def batch_of(tokenizer, length=256, count=30, **flags):
    task = objective(tokenizer, **flags)
    rows = rows_of(documents(tokenizer, count), length, tokenizer.pad_token_id)
    return rows, task.collate(rows, numbers(rows), 1)


def test_labels_are_the_row_and_shapes_match(tokenizer):
    rows, batch = batch_of(tokenizer)
    real = rows["segment_ids"] > 0
    np.testing.assert_array_equal(batch["labels"], np.where(real, rows["input_ids"], -100))
    assert {array.shape for array in batch.values()} == {rows["input_ids"].shape}
    assert all(array.dtype == np.int32 for array in batch.values())


def test_unknown_tokens_are_ordinary_tokens(tokenizer):
    task = objective(tokenizer)
    assert not task.is_special[tokenizer.unk_token_id] and task.is_special[tokenizer.eos_token_id]


def test_tokens_are_masked_and_sentences_permuted(tokenizer):
    rows, batch = batch_of(tokenizer, count=80)
    special = np.isin(rows["input_ids"], tokenizer.all_special_ids)
    text = (rows["segment_ids"] > 0) & ~special
    remaining = (batch["segment_ids"] > 0) & ~np.isin(batch["input_ids"], tokenizer.all_special_ids)
    lost = 1 - remaining.sum(axis=1) / text.sum(axis=1)
    assert abs(lost.mean() - 0.3) < 0.01 and np.abs(lost - 0.3).max() < 0.1
    masks = (batch["input_ids"] == tokenizer.mask_token_id).sum()
    spans = (text.sum() - remaining.sum()) / 3  # of mean length 3; some meet a special token
    assert 0.95 * spans < masks < 1.15 * spans


def test_permutation_keeps_all_sentences(tokenizer):
    task, texts = objective(tokenizer, mlm_probability=0.0), documents(tokenizer, 30)
    rows = LineRows(store_of(texts, tokenizer.pad_token_id), 400).fetch(np.arange(30))
    batch = task.collate(rows, numbers(rows), 1)
    moved = 0
    for previous, following in zip(rows["input_ids"], batch["input_ids"], strict=True):
        sentences = [
            re.findall(r"[A-ZÅ][^.]*\.", tokenizer.decode(ids)) for ids in (previous, following)
        ]
        assert sorted(sentences[0]) == sorted(sentences[1]) and len(sentences[0]) == 4
        moved += sentences[0] != sentences[1]
    assert moved > 20


def test_without_noise_the_input_is_the_row(tokenizer):
    rows, batch = batch_of(tokenizer, mlm_probability=0.0, permute_sentence_ratio=0.0)
    np.testing.assert_array_equal(batch["input_ids"], rows["input_ids"])


def test_packed_documents_start_independently(tokenizer):
    rows, batch = batch_of(tokenizer)
    segments, decoder = rows["segment_ids"], batch["decoder_input_ids"]
    starts = np.ones_like(segments, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts &= segments > 0
    assert (decoder[starts] == 2).all() and starts.sum() > len(rows["input_ids"])
    previous = ~starts[:, 1:] & (segments[:, 1:] > 0)
    np.testing.assert_array_equal(decoder[:, 1:][previous], rows["input_ids"][:, :-1][previous])
    np.testing.assert_array_equal(batch["decoder_segment_ids"], segments)


def test_across_documents_a_row_is_one_sequence(tokenizer):
    task = objective(tokenizer, cross_documents=True)
    pad = tokenizer.pad_token_id
    rows = rows_of(documents(tokenizer, 30), 256, pad, cross_documents=True)
    batch = task.collate(rows, numbers(rows), 1)
    assert set(np.unique(batch["segment_ids"])) <= {0, 1} and "decoder_segment_ids" not in batch
    first = batch["decoder_input_ids"][0]
    assert first.tolist() == [2, *rows["input_ids"][0, :-1].tolist()]


@pytest.mark.slow
def test_packed_losses_are_those_of_the_documents_one_by_one(tokenizer):
    from hfseq import FlaxBartForConditionalGeneration

    config = bart_config(dropout=0.0)
    model = FlaxBartForConditionalGeneration(config)
    task = objective(tokenizer, config, mlm_probability=0.0, permute_sentence_ratio=0.0)
    texts, pad = documents(tokenizer, 3, sentences=1), tokenizer.pad_token_id
    length = sum(map(len, texts)) + 5
    packed = loss_of(task, model, rows_of(texts, length, pad))
    alone = [loss_of(task, model, rows_of([text], length, pad)) for text in texts]
    assert packed[1] == sum(count for _, count in alone) == length - 5
    assert packed[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-5)


def test_a_tokenizer_without_a_mask_is_refused(tokenizer_of):
    with pytest.raises(UsageError, match="--model_type bart"):
        objective(tokenizer_of("gpt2"))


def test_rows_that_only_fill_the_batch_have_no_targets(tokenizer):
    task = objective(tokenizer)
    rows = rows_of(documents(tokenizer, 30), 256, tokenizer.pad_token_id)
    valid = np.arange(len(rows["input_ids"])) > 0
    labels = task.collate(rows | {"valid": valid}, numbers(rows), 1)["labels"]
    assert (labels[0] == -100).all() and (labels[1:] != -100).any(axis=1).all()


@pytest.mark.slow
def test_unknown_tokens_are_text(tokenizer):
    task = objective(tokenizer)
    assert not task.is_special[tokenizer.unk_token_id] and task.is_special[tokenizer.mask_token_id]
