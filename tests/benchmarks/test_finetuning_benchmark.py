"""Tests of the fine-tuning benchmark: rows and batches of the PyTorch loop, command, results."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from hfseq.training.arguments import parse

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import finetuning

TAGGED = {"tokens": ["unbelievable", "Ada"], "ner_tags": ["O", "B-PER"]}
ASKED = {
    "question": "Who sings?",
    "context": "Some say Ada sings.",
    "answers": {"text": ["Ada"], "answer_start": [9]},
}
OBJECTIVES = {
    "ner": "token_classification",
    "qa": "question_answering",
    "summarization": "summarization",
}


def test_the_first_token_of_a_word_has_its_label():
    tokenizer = finetuning.make_tokenizer([TAGGED], text_pairs=True)
    (row,) = finetuning.tag_rows(tokenizer, [TAGGED])
    assert [label for label in row["labels"] if label] == ["O", "B-PER"]
    assert len(row["labels"]) == len(row["input_ids"]) and row["labels"][0] is None


def test_answer_positions_are_those_of_its_tokens():
    tokenizer = finetuning.make_tokenizer([ASKED], text_pairs=True)
    unanswered = ASKED | {"answers": {"text": [], "answer_start": []}}
    row, unanswered_row = finetuning.read_rows(tokenizer, [ASKED, unanswered])
    tokens = row["input_ids"][row["start_positions"] : row["end_positions"] + 1]
    assert tokenizer.decode(tokens).strip() == "Ada"
    assert unanswered_row["start_positions"] == unanswered_row["end_positions"] == 0


def test_batches_are_padded_and_padding_has_no_labels():
    pytest.importorskip("torch")
    rows = [
        {"input_ids": [5, 6, 7], "labels": ["O", None, "B"]},
        {"input_ids": [5], "labels": ["B"]},
    ]
    (batch,) = finetuning.batches(rows, 2, [1, 0], {"O": 0, "B": 1})
    assert batch["input_ids"].tolist() == [[5, 0, 0], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[1, -100, -100], [0, -100, 1]]


@pytest.mark.parametrize("name", finetuning.TASKS)
def test_the_command_uses_existing_flags_of_the_script(name):
    command = finetuning.hfseq_command(finetuning.TASKS[name], name, "c", "d", "out", 7)
    arguments = parse(shlex.split(command)[1:], objective=OBJECTIVES[name])
    assert arguments.training.seed == 7 and arguments.data.train_file == ["d/train.jsonl"]
    assert arguments.training.per_device_train_batch_size == finetuning.TASKS[name].batch_size


def test_the_distance_of_a_mean_to_the_range_has_a_sign():
    assert finetuning.distance_to_range({"hfseq": [3.0, 5.0], "PyTorch": [1.0, 3.5]}) == 0.5
    assert finetuning.distance_to_range({"hfseq": [1.0, 2.0], "PyTorch": [2.0, 3.5]}) == -0.5


def test_earlier_results_of_other_tasks_are_kept(monkeypatch, tmp_path, capsys):
    def compare(name, folder, seeds):
        ours = [1.0, 2.0] if name == "qa" else [8.0, 9.0]
        return {
            "task": name,
            "metric": "f1",
            "hfseq": ours,
            "PyTorch": [1.5, 1.8],
            "baselines": {"lead: f1": 0.5},
            "mean_within": name == "qa",
            "ranges_overlap": name == "qa",
        }

    monkeypatch.setattr(finetuning, "compare", compare)
    arguments = ["--work_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path), "--tasks"]
    assert finetuning.main([*arguments, "qa"]) == 0
    assert finetuning.main([*arguments, "ner"]) == 1
    assert "no, +6.70 (ranges apart)" in capsys.readouterr().out
    results = json.loads((tmp_path / "finetuning.json").read_text())
    assert [result["task"] for result in results] == ["ner", "qa"]
