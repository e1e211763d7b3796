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

pytestmark = pytest.mark.slow

OBJECTIVES = {
    "ner": "token_classification",
    "qa": "question_answering",
    "summarization": "summarization",
}


@pytest.mark.parametrize("name", finetuning.TASKS)
def test_the_command_uses_existing_flags_of_the_script(name):
    command = finetuning.hfseq_command(finetuning.TASKS[name], name, "c", "d", "out", 7)
    arguments = parse(shlex.split(command)[1:], objective=OBJECTIVES[name])
    assert arguments.training.seed == 7 and arguments.data.train_file == ["d/train.jsonl"]
    assert arguments.training.per_device_train_batch_size == finetuning.TASKS[name].batch_size


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
