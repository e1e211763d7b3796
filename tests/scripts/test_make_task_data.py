"""Made examples: equal seeds give equal files, tags and answers stand where they are said to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.data.question_answering import answer_problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
pytest.importorskip("babel")

import make_task_data

PLAIN = ["This is a plain sentence that says nothing at all."]


def examples(task, count=200, train=True, seed=0):
    make, _ = make_task_data.TASKS[task]
    names = make_task_data.SlotValues(make_task_data.Random(seed), train)
    return [make(names, PLAIN) for _ in range(count)]


@pytest.mark.parametrize("task", make_task_data.TASKS)
def test_equal_seeds_give_equal_examples(task):
    assert examples(task) == examples(task) != examples(task, seed=1)


def test_answer_positions_are_correct():
    made = examples("qa")
    assert not [one for one in made if answer_problem(one, allow_unanswerable=True)]
    share = sum(not one["answers"]["text"] for one in made) / len(made)
    assert 0.15 < share < 0.35
    assert len({one["id"] for one in made}) == len(made)


def test_held_out_names_are_not_in_training_examples():
    held = {
        name
        for kind in make_task_data.SlotValues(
            make_task_data.Random(0), False
        ).names_by_type.values()
        for name in kind
        if make_task_data.is_held_out(name)
    }
    text = " ".join(one["summary"] for one in examples("summarization"))
    assert held and not [name for name in held if f" in {name} by" in text]


def test_script_writes_three_files_and_prints_baselines(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some plain sentence that nobody ever wrote before. Short.")
    command = [sys.executable, str(ROOT / "scripts" / "make_task_data.py"), "--task", "qa",
               "--output_dir", str(tmp_path / "made"), "--train", "30", "--validation", "5",
               "--test", "20", "--text_file", str(text)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "qa, no answer: f1 " in done.stdout
    lines = {path.name: path.read_text().splitlines() for path in (tmp_path / "made").iterdir()}
    assert [len(lines[f"{split}.jsonl"]) for split in make_task_data.SPLITS] == [30, 5, 20]
    assert json.loads(lines["test.jsonl"][0])["question"].endswith("?")
