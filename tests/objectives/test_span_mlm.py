"""T5's objective in the training loop: exact widths, sentinels, decoder starts, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.arguments import SpanArguments
from hfseq.data.batches import LineRows
from hfseq.errors import UsageError
from hfseq.objectives.span_mlm import SpanMaskedLM, count_spans
from tests.objectives.conftest import loss_of, loss_of_batch, numbers, rows_of, store_of


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("t5")


def t5_config(**changes):
    from transformers import T5Config

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5Config(**{"vocab_size": 400, "decoder_start_token_id": 0, **sizes, **changes})


def objective(tokenizer, config=None, **flags):
    return SpanMaskedLM(SpanArguments(**flags), tokenizer, config or t5_config())


def documents(count, seed=0):
    """Returns token lists of random lengths, each with </s> at the end."""
    chooser = np.random.default_rng(seed)
    return [[*chooser.integers(3, 70, chooser.integers(5, 90)).tolist(), 1] for _ in range(count)]


def test_rows_of_two_tokens_have_a_span_and_rows_of_one_have_none():
    noise, spans = count_spans(np.array([0, 1, 2, 3]), 0.15, 3.0)
    assert noise.tolist() == spans.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mlm_probability": 0.5},
        {"mean_noise_span_length": 1.0},
        {"mlm_probability": 0.25, "mean_noise_span_length": 2.0},
    ],
)
@pytest.mark.parametrize("length", [32, 128])
def test_inputs_have_the_requested_length(tokenizer, length, flags):
    task = objective(tokenizer, **flags)
    rows = rows_of(documents(60), task.row_length(length), cross_documents=True)
    rows = {name: array[:-1] for name, array in rows.items()}  # the last one is short
    batch = task.collate(rows, numbers(rows), 1)
    assert batch["input_ids"].shape[1] == length and (batch["segment_ids"] == 1).all()
    assert batch["labels"].shape[1] == task.target_length(length)
    assert (batch["labels"] != -100).all()
    assert batch["decoder_input_ids"].shape == batch["labels"].shape


def restore(task, batch, row):
    """Restores the text of a row from its inputs and labels."""
    labels = batch["labels"][row]
    spans, current = {}, None
    for token in labels[labels != -100][:-1].tolist():
        if token in task.sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    source = batch["input_ids"][row][batch["segment_ids"][row] > 0][:-1].tolist()
    return [token for item in source for token in spans.get(item, [item])]


@pytest.mark.parametrize("lines", [False, True])
def test_inputs_and_targets_reconstruct_every_row(tokenizer, lines):
    task, texts = objective(tokenizer), documents(40)
    raw = task.row_length(64)
    if lines:
        rows = LineRows(store_of(texts), raw).fetch(np.arange(40))
    else:
        rows = rows_of(texts, raw, cross_documents=True)
    batch = task.collate(rows, numbers(rows), 1)
    assert len(rows["input_ids"]) == (40 if lines else -(-sum(map(len, texts)) // raw))
    for row in range(len(rows["input_ids"])):
        real = rows["segment_ids"][row] > 0
        assert restore(task, batch, row) == rows["input_ids"][row][real].tolist()
    if not lines:
        last = rows["segment_ids"][-1].sum()
        assert last < raw  # short, and still a row with targets
        assert (batch["labels"][-1] == -100).any() and (batch["labels"][-1] != -100).sum() > 2


def test_the_decoder_reads_the_start_and_the_labels_before(tokenizer):
    task = objective(tokenizer)
    rows = rows_of(documents(10), 70, cross_documents=True)
    batch = task.collate(rows, numbers(rows), 1)
    full = batch["labels"][0]
    assert batch["decoder_input_ids"][0].tolist() == [0, *full[:-1].tolist()]
    assert full[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>") and full[-1] == 1


def test_rows_that_only_fill_the_batch_have_no_targets(tokenizer):
    task = objective(tokenizer)
    rows = rows_of(documents(10), 70, cross_documents=True)
    valid = np.arange(len(rows["input_ids"])) > 0
    labels = task.collate(rows | {"valid": valid}, numbers(rows), 1)["labels"]
    assert (labels[0] == -100).all() and (labels[1:] != -100).any(axis=1).all()


def test_more_spans_than_sentinels_are_refused_before_training(tokenizer):
    task = objective(tokenizer, mean_noise_span_length=1.0)
    assert task.row_length(512) == 511
    with pytest.raises(UsageError, match="153 masked spans.*has 100 sentinels.*--max_seq_length"):
        task.row_length(1024)
    with pytest.raises(UsageError, match="--max_seq_length 3 .*at least 4"):
        task.row_length(3)


def test_sentinels_are_added_and_embeddings_resized(tokenizer_of):
    import copy

    plain = copy.deepcopy(tokenizer_of("roberta"))
    config = t5_config(vocab_size=len(plain))
    with pytest.raises(UsageError, match="has 0 sentinels"):
        objective(plain, config).row_length(64)
    # weights are loaded: nothing can grow
    SpanMaskedLM.configure(config, plain, from_scratch=False)
    assert config.vocab_size == len(plain)
    previous = len(plain)
    SpanMaskedLM.configure(config, plain, from_scratch=True)
    assert config.vocab_size == len(plain) == previous + 100
    task = objective(plain, config)
    assert task.sentinels[0] == previous + 99 and task.sentinels[99] == previous  # as in T5
    assert task.row_length(64) == 70


def test_a_missing_decoder_start_is_the_padding_token(tokenizer, caplog):
    config = t5_config(decoder_start_token_id=None)
    SpanMaskedLM.configure(config, tokenizer, from_scratch=True)
    assert config.decoder_start_token_id == tokenizer.pad_token_id == 0
    assert "no decoder_start_token_id: using 0" in caplog.text
    config = t5_config(decoder_start_token_id=None, pad_token_id=None)
    tokenizer = type("Nameless", (), {"pad_token_id": None})()
    with pytest.raises(UsageError, match="decoder_start_token_id=N"):
        SpanMaskedLM.configure(config, tokenizer, from_scratch=True)


def test_reference_files_are_refused(tokenizer):
    with pytest.raises(UsageError, match="--train_ref_file is for whole-word masking"):
        objective(tokenizer, train_ref_file="x.json")


@pytest.mark.slow
def test_the_loss_is_that_of_the_labels_and_does_not_see_padding(tokenizer):
    from hfseq import FlaxT5ForConditionalGeneration

    config = t5_config(dropout_rate=0.0)
    model = FlaxT5ForConditionalGeneration(config)
    task = objective(tokenizer, config)
    rows = rows_of(documents(10), 141, cross_documents=True)
    assert loss_of(task, model, rows)[1] == 29 * (len(rows["input_ids"]) - 1) + shorter(task, rows)
    short = {name: array[-1:] for name, array in rows.items()}
    padded = task.collate(short, numbers(short), 1)
    real = int(padded["segment_ids"].sum()), int((padded["labels"] != -100).sum())
    cut = {
        "input_ids": padded["input_ids"][:, : real[0]],
        "segment_ids": padded["segment_ids"][:, : real[0]],
        "decoder_input_ids": padded["decoder_input_ids"][:, : real[1]],
        "labels": padded["labels"][:, : real[1]],
    }
    assert cut["input_ids"].size < padded["input_ids"].size
    total, count = loss_of_batch(task, model, padded)
    assert count == real[1]
    assert total == pytest.approx(loss_of_batch(task, model, cut)[0], rel=1e-5)


def shorter(task, rows):
    """Targets of the last row by the formula."""
    noise, spans = count_spans(int((rows["segment_ids"][-1] > 0).sum()), *task.noise_settings)
    return int(noise + spans + 1)
