"""The comparison of fine-tunings: rows of the plain loop, the judgement, and what is kept."""

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


def test_an_answer_is_where_its_tokens_are():
    tokenizer = finetuning.make_tokenizer([ASKED], text_pairs=True)
    without = ASKED | {"answers": {"text": [], "answer_start": []}}
    found, nothing = finetuning.read_rows(tokenizer, [ASKED, without])
    tokens = found["input_ids"][found["start_positions"] : found["end_positions"] + 1]
    assert tokenizer.decode(tokens).strip() == "Ada"
    assert nothing["start_positions"] == nothing["end_positions"] == 0


def test_batches_are_padded_and_labels_ignored_there():
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
def test_the_command_has_flags_of_its_script(name):
    command = finetuning.hfseq_command(finetuning.TASKS[name], name, "c", "d", "out", 7)
    found = parse(shlex.split(command)[1:], objective=OBJECTIVES[name])
    assert found.training.seed == 7 and found.data.train_file == ["d/train.jsonl"]
    assert found.training.per_device_train_batch_size == finetuning.TASKS[name].batch_size


def test_a_mean_outside_of_the_range_is_told_with_its_distance():
    assert finetuning.outside({"hfseq": [3.0, 5.0], "PyTorch": [1.0, 3.5]}) == 0.5
    assert finetuning.outside({"hfseq": [1.0, 2.0], "PyTorch": [2.0, 3.5]}) == -0.5


def test_tasks_that_are_not_run_again_stay(monkeypatch, tmp_path, capsys):
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
    given = ["--work_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path), "--tasks"]
    assert finetuning.main([*given, "qa"]) == 0
    assert finetuning.main([*given, "ner"]) == 1
    assert "no, +6.70 (ranges apart)" in capsys.readouterr().out
    kept = json.loads((tmp_path / "finetuning.json").read_text())
    assert [one["task"] for one in kept] == ["ner", "qa"]
