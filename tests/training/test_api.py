"""``hfseq.train``: training from Python with objects in memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, RobertaConfig

import hfseq
from hfseq.errors import HfseqError, UsageError
from tests.support import runs
from tests.training.conftest import losses


@pytest.fixture
def values(flags, corpus) -> dict[str, Any]:
    """The flags of a tiny masked language model by name, without data, tokenizer and output."""
    words = flags(global_batch_size=None, per_device_train_batch_size=2)
    named = dict(word[2:].split("=", 1) for word in words)
    for name in ("output_dir", "train_file", "validation_file", "tokenizer_name"):
        del named[name]
    return named


@pytest.fixture
def data(corpus) -> tuple[list[dict[str, str]], Dataset]:
    rows = {
        split: [json.loads(line) for line in (corpus / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "valid")
    }
    return rows["train"], Dataset.from_list(rows["valid"])


def test_losses_are_those_of_the_command_also_if_training_is_interrupted(
    flags, values, data, corpus, tmp_path
):
    words = flags("command", global_batch_size=None, per_device_train_batch_size=2)
    expected = runs.train(words, devices=None)
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    steps = []

    def interrupt(info):
        steps.append(info.progress.step)
        if steps == [1, 2, 3]:
            os.kill(os.getpid(), signal.SIGINT)

    def train(tokenizer):
        options = {"output_dir": tmp_path / "python", "callbacks": [interrupt]}
        return hfseq.train("mlm", None, tokenizer, *data, **options, **values)

    with pytest.raises(KeyboardInterrupt, match="call train again"):
        train(tokenizer)
    assert steps == [1, 2, 3]
    result = train(str(corpus / "tokenizer"))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "python") == losses(tmp_path / "command")
    assert result.metrics["eval_loss"] == expected.metrics["eval_loss"]
    assert type(result.model).__name__ == "FlaxRobertaForMaskedLM"
    outputs = result.model(np.ones((1, 4), np.int32)).logits
    assert np.isfinite(np.asarray(outputs)).all()


def test_a_model_in_memory_is_the_start(values, data, corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=40,
    )
    model = hfseq.FlaxRobertaForMaskedLM(config, seed=7)
    del values["model_type"], values["config_overrides"]
    values |= {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-9, "do_train": True}
    result = hfseq.train("mlm", model, tokenizer, *data, output_dir=tmp_path / "run", **values)
    before, after = (
        m.params["roberta"]["embeddings"]["word_embeddings"] for m in (model, result.model)
    )
    np.testing.assert_allclose(before["embedding"], after["embedding"], atol=1e-6)
    assert (tmp_path / "run-start" / "config.json").is_file()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"objective": "mlmm"}, UsageError, "unknown objective 'mlmm'.*did you mean 'mlm'"),
        ({"learning_rat": 1.0}, UsageError, "'learning_rat'.*did you mean 'learning_rate'"),
        ({"train_dataset": []}, UsageError, "empty"),
        ({"train_dataset": [1, 2]}, UsageError, "dicts or strings"),
        ({"train_dataset": "corpus.txt"}, UsageError, "type str"),
        ({"train_file": "x.jsonl"}, UsageError, "train_file.*in memory"),
        ({"token": "hf_x"}, UsageError, "token"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(
    values, corpus, tmp_path, changes, error, message
):
    arguments = {
        "objective": "mlm",
        "tokenizer": str(corpus / "tokenizer"),
        "train_dataset": ["the law is read by all who live there"] * 30,
        "output_dir": tmp_path / "run",
        **values,
        **changes,
    }
    assert issubclass(error, HfseqError)
    with pytest.raises(error, match=f"(?s){message}"):
        hfseq.train(**arguments)
    assert not list(Path(tmp_path).glob("run/*.safetensors"))
