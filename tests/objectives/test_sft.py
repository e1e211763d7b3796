"""Instruction tuning: which tokens have a loss, with and without packing."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import hfseq
from hfseq.data.arguments import ChatArguments
from hfseq.data.batches import Batches
from hfseq.objectives.sft import InstructionTuning
from tests.objectives.conftest import loss_of_batch, numbers
from tests.support import chats
from tests.support.chats import END_TOKEN, OPEN_TEMPLATE, TEMPLATE
from tests.support.models import gpt2_config, llama_config

SIZES = {"vocab_size": 302, "max_position_embeddings": 96, "eos_token_id": 0, "bos_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chats.write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def model():
    return hfseq.FlaxLlamaForCausalLM(llama_config(**SIZES))


@pytest.fixture
def tuning(folder, tmp_path, model):
    """Returns a function from flags to an objective with 60 conversations and its rows."""
    file = tmp_path / "train.jsonl"
    chats.write_lines(file, ({"messages": item} for item in chats.conversations(60)))

    def make(trained: Any = model, template: str = TEMPLATE, **flags: Any):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        options = {"train_file": [str(file)], "assistant_only_loss": True} | flags
        objective = InstructionTuning(ChatArguments(**options), tokenizer, trained.config)
        objective.prepare(trained)
        return objective, objective.make_rows(objective.load_splits(None), "train", 96)[0]

    return make


def all_of(rows: Any) -> dict:
    return Batches(rows, len(rows), 0, shuffle=False)[0]


@pytest.mark.parametrize("packing", [False, True])
def test_no_token_of_a_prompt_has_a_loss_and_every_one_of_an_answer_has(tuning, packing):
    objective, rows = tuning(packing=packing)
    fetched = all_of(rows)
    batch = objective.collate(fetched, numbers(fetched), 1)
    answers = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        targets = np.flatnonzero(labels != -100)
        assert (ids[targets + 1] == labels[targets]).all()
        answers += objective.tokenizer.decode(labels[targets].tolist()).split(END_TOKEN)[:-1]
    records = objective.load_splits(None)["train"]
    talk = [item for row in range(len(records)) for item in records[row]["messages"]]
    assert sorted(answers) == sorted(t["content"] for t in talk if t["role"] == "assistant")


def test_packed_examples_have_their_single_losses(tuning, model):
    (alone, rows), (packed, shared) = tuning(), tuning(packing=True)
    assert len(shared) < 0.6 * len(rows)
    expected, count = loss_of_batch(alone, model, alone.collate(all_of(rows), None, 1))
    total, same = loss_of_batch(packed, model, packed.collate(all_of(shared), None, 1))
    assert count == same > 100
    assert total == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_that_of_pytorch(tuning, model, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    objective, rows = tuning()
    batch = objective.collate(all_of(rows), None, 1)
    total, count = loss_of_batch(objective, model, batch)
    model.save_pretrained(tmp_path / "model")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.from_numpy(batch["input_ids"]).long()
    mask = torch.from_numpy(batch["segment_ids"] > 0).long()
    with torch.no_grad():
        logits = theirs(ids, attention_mask=mask).logits
    labels = torch.from_numpy(batch["labels"]).long()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert total / count == pytest.approx(expected.item(), rel=1e-5)


def test_padding_rows_do_not_count(tuning):
    objective, rows = tuning()
    fetched = all_of(rows)
    fetched["valid"][3:] = False
    labels = objective.collate(fetched, None, 1)["labels"]
    assert (labels[3:] == -100).all() and (labels[:3] != -100).any()


def test_generation_stops_at_the_end_of_a_turn(tuning):
    model = hfseq.FlaxLlamaForCausalLM(llama_config(**SIZES), _do_init=False)
    tuning(model, eos_token=END_TOKEN)
    assert model.generation_config.eos_token_id == [301, 0] and model.config.eos_token_id == 301


def test_turn_without_learned_end_causes_a_warning(tuning, caplog):
    with caplog.at_level(logging.WARNING):
        tuning(eos_token=END_TOKEN)
    assert not caplog.text
    fresh = hfseq.FlaxLlamaForCausalLM(llama_config(**SIZES), _do_init=False)
    with caplog.at_level(logging.WARNING):
        tuning(fresh)
    assert "ends an answer with <|im_end|>, but generation stops at <|endoftext|>" in caplog.text
    with caplog.at_level(logging.WARNING):
        tuning(fresh, OPEN_TEMPLATE)
    assert "the model will not learn to stop" in caplog.text


def test_models_that_cannot_keep_examples_apart_get_one_a_row(tuning, caplog, monkeypatch):
    model = hfseq.FlaxLlamaForCausalLM(llama_config(**SIZES), _do_init=False)
    monkeypatch.setattr(model, "accepts", lambda name: name != "segment_ids")
    with caplog.at_level(logging.WARNING):
        objective, rows = tuning(model, packing=True)
    assert len(rows) == len(objective.load_splits(None)["train"])
    assert "does not accept segment_ids" in caplog.text


def test_samples_answer_the_prompt(tuning, folder):
    model = hfseq.FlaxGPT2LMHeadModel(gpt2_config(vocab_size=302, n_positions=96))
    for packing in (False, True):
        objective, rows = tuning(model, packing=packing)
        inputs = [options for options, _ in objective.samples(model, model.params, rows, 3)]
        assert len(inputs) == 3
        assert all(
            options.endswith("assistant") and options.count("user") == 1 for options in inputs
        )
    objective, rows = tuning(model, assistant_only_loss=False)
    assert len(objective.samples(model, model.params, rows, 2)) == 2
