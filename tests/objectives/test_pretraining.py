"""Replaced token detection and sentence order: batches, and losses compared with NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from transformers import AlbertConfig, BertConfig, ElectraConfig

from hfseq.data.arguments import DataArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.errors import UsageError
from hfseq.objectives.pretraining import ReplacedTokens, SentenceOrder
from tests.objectives.conftest import loss_of_batch, numbers, rows_of

SIZES = {
    "vocab_size": 400,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
DOCUMENTS = [list(range(20 + 40 * n, 45 + 40 * n + n)) for n in range(8)]


@pytest.fixture
def objective(tokenizer_of):
    def make(variant, config=None, probability=0.3):
        data = DataArguments(mlm_probability=probability)
        return variant(data, tokenizer_of("bert"), config or ElectraConfig(**SIZES))

    return make


def test_replaced_tokens_are_labelled_and_come_from_their_row(objective):
    output, rows = objective(ReplacedTokens), rows_of(DOCUMENTS, 32)
    batch = output.collate(rows, numbers(rows), 1)
    real = rows["segment_ids"] > 0
    changed = batch["input_ids"] != rows["input_ids"]
    assert np.array_equal(batch["labels"][real], changed[real].astype(int))
    assert (batch["labels"][~real] == IGNORE_INDEX).all() and not changed[~real].any()
    assert 0.15 < changed[real].mean() < 0.4
    for row, ids in enumerate(batch["input_ids"]):
        assert set(ids[changed[row]]) <= set(rows["input_ids"][row][real[row]])


def test_row_noise_depends_only_on_the_row(objective):
    output, rows = objective(ReplacedTokens), rows_of(DOCUMENTS, 32)
    full = output.collate(rows, numbers(rows), 1)["input_ids"]
    some = {name: values[2:4] for name, values in rows.items()}
    part = output.collate(some, RowRandom(0, 0, np.arange(2, 4)), 1)["input_ids"]
    assert np.array_equal(part, full[2:4])


def test_loss_of_replaced_tokens_is_that_of_numpy(objective):
    from hfseq import FlaxElectraForPreTraining

    output, rows = objective(ReplacedTokens), rows_of(DOCUMENTS, 32)
    model = FlaxElectraForPreTraining(output.config, seed=1)
    batch = output.collate(rows, numbers(rows), 1)
    logits = np.asarray(
        jax.jit(model)(
            batch["input_ids"],
            (batch["segment_ids"] > 0).astype(int),
            segment_ids=batch["segment_ids"],
        ).logits,
        np.float64,
    )
    chance, labels = 1 / (1 + np.exp(-logits)), batch["labels"]
    each = -np.log(np.where(labels == 1, chance, 1 - chance))
    total, count = loss_of_batch(output, model, batch)
    assert count == (labels != IGNORE_INDEX).sum()
    assert total == pytest.approx(each[labels != IGNORE_INDEX].sum(), rel=1e-5)


def test_segments_are_swapped_and_have_token_types(objective):
    output = objective(SentenceOrder, AlbertConfig(embedding_size=8, **SIZES), 1e-9)
    rows = rows_of(DOCUMENTS, 29, cross_documents=True)
    batch = output.collate(rows, numbers(rows), 1)
    assert set(batch["order"]) == {0, 1}
    cls, sep = output.tokenizer.cls_token_id, output.tokenizer.sep_token_id
    for row, ids in enumerate(batch["input_ids"]):
        real = batch["segment_ids"][row] > 0
        item = ids[real & (batch["token_type_ids"][row] == 0)]
        other = ids[real & (batch["token_type_ids"][row] == 1)]
        assert item[0] == cls and item[-1] == other[-1] == sep
        pieces = [item[1:-1], other[:-1]]
        text = np.concatenate(pieces[::-1] if batch["order"][row] else pieces)
        inputs = rows["input_ids"][row][rows["segment_ids"][row] > 0]
        assert np.array_equal(text, inputs[~output.is_special[inputs]])


def test_order_loss_and_mlm_loss_have_equal_weight(objective):
    from hfseq import FlaxAlbertForPreTraining

    created = objective(SentenceOrder, AlbertConfig(embedding_size=8, **SIZES))
    model, rows = FlaxAlbertForPreTraining(created.config, seed=1), rows_of(DOCUMENTS, 29)
    batch = created.collate(rows, numbers(rows), 1)
    output = jax.jit(model)(
        batch["input_ids"],
        attention_mask=(batch["segment_ids"] > 0).astype(int),
        token_type_ids=batch["token_type_ids"],
    )

    def cross_entropy(logits, labels):
        logits = np.asarray(logits, np.float64)
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        picked = np.take_along_axis(chances, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return -np.log(picked)[labels != IGNORE_INDEX].sum()

    flat = np.asarray(output.prediction_logits).reshape(1, -1, 400)
    masked = np.take_along_axis(flat, batch["masked_positions"][..., None], 1)
    right = cross_entropy(masked, batch["labels"])
    right += 0.3 * 29 * cross_entropy(output.sop_logits, batch["order"])
    total, count = loss_of_batch(created, model, batch)
    assert count == (batch["labels"] != IGNORE_INDEX).sum()
    assert total == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize(
    ("variant", "name", "config"),
    [
        (ReplacedTokens, "FlaxBertForPreTraining", BertConfig),
        (SentenceOrder, "FlaxElectraForPreTraining", ElectraConfig),
    ],
)
def test_a_model_without_the_head_is_refused(objective, variant, name, config):
    import hfseq

    model = getattr(hfseq, name)(config(**SIZES), _do_init=False)
    with pytest.raises(UsageError, match=f"{name}.*--model_type"):
        objective(variant).prepare(model)


def test_a_tokenizer_without_separators_is_refused(tokenizer_of):
    data = DataArguments()
    tokenizer = tokenizer_of("roberta")
    tokenizer.sep_token = None
    with pytest.raises(UsageError, match="no sep token"):
        SentenceOrder(data, tokenizer, AlbertConfig(**SIZES))
