"""Causal language modeling: targets, separation of documents, and perplexities."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import FlaxAutoModelForCausalLM
from hfseq.data.arguments import CausalArguments
from hfseq.data.batches import LineRows
from hfseq.errors import UsageError
from hfseq.objectives.clm import CausalLM
from tests.objectives.conftest import loss_of, loss_of_batch, rows_of, store_of
from tests.support.models import bert_config
from tests.support.tiers import first

DOCUMENTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14], [15, 16]]


def objective(config=None, **flags):
    return CausalLM(CausalArguments(**flags), None, config)


def labels_of(rows, **flags):
    return objective(**flags).collate(rows, None, 1)["labels"].tolist()


def test_the_target_is_the_next_token_of_the_same_document():
    assert labels_of(rows_of(DOCUMENTS, 4)) == [
        [6, 7, -100, 9],  # 9 is the first token of the next row
        [10, 11, 12, 13],
        [-100, -100, 16, -100],
    ]
    assert labels_of(rows_of(DOCUMENTS, 5)) == [
        [6, 7, -100, 9, 10],
        [11, 12, 13, -100, -100],
        [16, -100, -100, -100, -100],
    ]


def test_across_documents_every_token_but_the_first_is_a_target():
    rows = rows_of(DOCUMENTS, 5, cross_documents=True)
    assert labels_of(rows, cross_documents=True) == [
        [6, 7, 8, 9, 10],
        [11, 12, 13, 14, 15],
        [16, -100, -100, -100, -100],
    ]
    assert rows["segment_ids"].tolist() == [[1] * 5, [1] * 5, [1, 1, 0, 0, 0]]
    assert rows["position_ids"][1].tolist() == [0, 1, 2, 3, 4]
    assert objective(cross_documents=True).cross_documents


def test_truncated_line_ends_the_document():
    rows = LineRows(store_of(DOCUMENTS), 4, pad_to_max_length=True).fetch(np.arange(4))
    assert labels_of(rows) == [
        [6, 7, -100, -100],
        [9, 10, 11, -100],
        [-100] * 4,
        [16, -100, -100, -100],
    ]


def test_rows_that_only_fill_the_batch_have_no_targets():
    rows = rows_of(DOCUMENTS, 4) | {"valid": np.array([True, False, True])}
    labels = np.array(labels_of(rows))
    assert (labels[1] == -100).all() and (labels[0] != -100).any()


@pytest.fixture(scope="module", params=first(["gpt2", "bert"], "gpt2"))
def model(request):
    if request.param == "gpt2":
        from transformers import GPT2Config

        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=40)
    else:
        config = bert_config(is_decoder=False)
    CausalLM.configure(config, None, True)
    return FlaxAutoModelForCausalLM.from_config(config)


def test_packed_losses_are_those_of_the_documents_one_by_one(model):
    chooser = np.random.default_rng(0)
    documents = [chooser.integers(5, 64, n).tolist() for n in (7, 12, 5, 9, 3)]
    task = objective(model.config)
    packed = loss_of(task, model, rows_of(documents, 36))
    alone = [loss_of(task, model, rows_of([document], 36)) for document in documents]
    assert packed[1] == sum(count for _, count in alone) == 36 - 5
    assert packed[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-5)


def test_a_token_is_predicted_from_those_before_it_only(model):
    task = objective(model.config)
    document = np.random.default_rng(1).integers(5, 64, 12).tolist()
    rows = rows_of([document], 36)
    batch = task.collate(rows, None, 1)
    batch["labels"][:, 8:] = -100
    previous = loss_of_batch(task, model, batch)
    batch["input_ids"][:, 8:] = 5
    assert loss_of_batch(task, model, batch) == previous
    batch["input_ids"][:, 2] = 5
    assert loss_of_batch(task, model, batch)[0] != pytest.approx(previous[0], rel=1e-6)


def test_perplexities_are_per_token_and_per_word():
    totals = {"loss": 60.0, "count": 20, "correct": 5}
    assert objective().metrics(totals) == {
        "loss": 3.0,
        "perplexity": pytest.approx(math.exp(3)),
        "accuracy": 0.25,
    }
    for words in (15, 1):
        with_words = objective().metrics(totals | {"words": words})
        assert with_words["word_perplexity"] == pytest.approx(math.exp(60 / words))


class Known:
    """A tokenizer that only defines EOS."""

    eos_token_id = 1


def test_tokens_after_end_of_text_are_targets():
    rows = rows_of(DOCUMENTS, 5)
    batch = CausalLM(CausalArguments(start_with_eos=True), Known(), None).collate(rows, None, 1)
    assert batch["labels"].tolist() == [
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14],
        [15, 16, -100, -100, -100],
    ]
    assert batch["input_ids"].tolist() == [
        [1, 5, 6, 1, 8],
        [1, 10, 11, 12, 1],
        [1, 15, 16, 0, 0],
    ]
    windows = rows_of(DOCUMENTS, 5, cross_documents=True)
    windows |= {"previous_ids": np.array([-1, 9, 14]), "fresh": np.array([True, False, False])}
    batch = CausalLM(CausalArguments(start_with_eos=True), Known(), None).collate(windows, None, 1)
    assert batch["input_ids"][:, 0].tolist() == [1, 9, 14]
    assert batch["input_ids"][0].tolist() == [1, 5, 6, 7, 8]
    assert batch["reset_rows"].tolist() == [True, False, False]


def test_a_tokenizer_without_an_end_of_text_cannot_start_with_it():
    with pytest.raises(UsageError, match="--start_with_eos .*end-of-text token"):
        CausalLM(CausalArguments(start_with_eos=True), SimpleNamespace(eos_token_id=None), None)


def test_bits_per_byte_and_words_follow_their_formulas():
    totals = {"loss": 30.0, "count": 10.0, "correct": 5.0}
    actual = objective().metrics(totals | {"bytes": 44, "tokens": 11})
    assert actual["bits_per_byte"] == pytest.approx(3.0 * 11 / 44 / math.log(2))
    assert "bits_per_byte" not in objective().metrics(totals)
    assert objective().metrics(totals | {"auxiliary_loss": 5.0})["auxiliary_loss"] == 0.5


class Adding:
    """A model with two logits that accepts a code mask and adds 6 to the loss in training."""

    config = SimpleNamespace(vocab_size=2)
    extra: ClassVar[dict] = {}
    extra_shape_tree: ClassVar[dict] = {"codebook": {}}
    statistics = ("codebook",)
    abstract_params: ClassVar[dict] = {}

    def accepts(self, name):
        return name == "code_mask"

    def __call__(self, input_ids, train=False, extra=None, **inputs):
        self.inputs = inputs
        logits = jnp.zeros((*input_ids.shape, 2))
        added = jnp.float32(6.0) if train else None
        return SimpleNamespace(logits=logits, auxiliary_loss=added), extra


class Balancing(Adding):
    """A model with a load-balancing loss, 6 times the number of tokens that are not padding."""

    config = SimpleNamespace(vocab_size=2, output_router_logits=True)
    statistics = ()

    def __call__(self, input_ids, train=False, extra=None, attention_mask=None, **inputs):
        logits = jnp.zeros((*input_ids.shape, 2))
        added = 6.0 * attention_mask.sum()
        return SimpleNamespace(logits=logits, auxiliary_loss=added), extra


def test_load_balancing_losses_are_added_to_the_mean_loss_per_label():
    clm, model = objective(), Balancing()
    batch = clm.collate(rows_of([[0, 1, 0], [1, 1]], 4), None, 1)
    total, count, extra = clm.loss(model, {}, batch, None, True, extra={})
    assert int(count) < int((batch["segment_ids"] > 0).sum())
    assert float(total / count) == pytest.approx(math.log(2) + 6.0)
    assert float(extra["totals"]["loss"] / count) == pytest.approx(math.log(2))
    assert float(extra["totals"]["auxiliary_loss"] / count) == pytest.approx(6.0)


def test_auxiliary_losses_are_minimized_and_reported():
    clm, model = objective(loss_per_position=True), Adding()
    clm.uses_code_mask = model.accepts("code_mask")
    rows = rows_of([[0, 1, 0], [1, 1]], 4, cross_documents=True)
    batch = clm.collate(rows | {"valid": np.array([True, False])}, None, 1)
    total, count, extra = clm.loss(model, {}, batch, None, True, extra={})
    plain = 4 * math.log(2)
    assert float(total) == pytest.approx(plain + 6.0) and int(count) == 4
    assert float(extra["totals"]["loss"]) == pytest.approx(plain)
    assert float(extra["totals"]["auxiliary_loss"]) == 6.0
    assert float(extra["divisor"]) == 4.0  # padding rows do not count
    assert model.inputs["code_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]
    total, _, extra = clm.loss(model, {}, batch, None, False, extra={})
    assert float(total) == pytest.approx(plain) and set(extra["totals"]) == {"correct"}
    assert "divisor" not in extra
