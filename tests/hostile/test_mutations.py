"""Damaged and malicious files are read correctly or rejected with a message.

Findings are crashes, more than 5 s, more memory than twice the file size plus 64 MB, writes outside
the folder, and code that runs. Subject and number are the seed of a case and reproduce it.
"""

from __future__ import annotations

import json

import pytest

from tests.hostile import guard, mutators
from tests.hostile.command_subjects import READING, RUNNING
from tests.hostile.subjects import SUBJECTS

QUICK = (
    "safetensors", "index", "msgpack", "tokenizer", "text", "jsonl", "csv", "parquet", "stream",
    "pairs-jsonl", "pairs-csv", "pairs-parquet", "pairs-aligned", "tfrecord", "tfds-info",
    "examples-jsonl", "examples-tsv", "examples-parquet", "store", "store-header", "arrays", "log",
    "arguments",
)  # fmt: skip
#: Subjects that build a model for each file, which takes a hundred times as long.
MODELS = (
    "safetensors-model",
    "msgpack-model",
    "pytorch-bin",
    "config-bert",
    "config-gpt2",
    "config-marian",
    "config-twin",
    "config-vq",
    "config-training",
    "fp8-sidecar",
    "checkpoint",
    "checkpoint-unsealed",
)
#: Subjects that ignore damaged lines instead of rejecting the file, and commands that report
#: problems.
FORGIVING = ("log",)
A_FEW, SOME, MANY = 10, 80, 300
#: Commands that build or run a model.
BUILDING, RUNS = 100, 170


def count(subject):
    """Returns the number of files of a subject with `-m slow`."""
    if subject in RUNNING:
        return RUNS
    if subject in READING and subject.startswith(
        ("inspect-names", "inspect-shapes", "convert", "plan")
    ):
        return BUILDING
    return SOME if subject in MODELS else MANY


def findings(subjects, first, count, folder):
    outcomes = list(guard.run(subjects, first, count, folder))
    assert len(outcomes) == len(subjects) * count
    refused = {outcome.subject for outcome in outcomes if outcome.how == "refused"}
    assert refused or set(subjects) <= {*FORGIVING, *READING}
    return [outcome for outcome in outcomes if not outcome.ok]


@pytest.mark.slow
def test_a_few_hundred_mutated_files(tmp_path):
    assert findings(QUICK, 0, A_FEW, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_thousands_of_mutated_files(tmp_path, subject):
    assert findings([subject], 0, count(subject), tmp_path) == []


def test_there_are_thousands():
    assert sum(map(count, SUBJECTS)) >= 10_000
    assert sum(map(count, RUNNING)) >= 500


def test_case_is_reproducible_from_its_number():
    import random

    good = {
        "json": json.dumps({"a": 1, "b": [2, {"c": "d"}]}).encode(),
        "lines": b'{"a": 1}\n{"a": 2}\n',
        "text": b"a,b\n1,2\n",
        "bytes": bytes(range(64)),
        "msgpack": bytes(range(64)),
        "safetensors": _safetensors(),
    }
    for name, mutate in mutators.MUTATORS.items():
        cases = [mutate(good[name], random.Random(seed)) for seed in range(50)]
        assert cases == [mutate(good[name], random.Random(seed)) for seed in range(50)]
        assert len({case for case in cases if case != good[name]}) > 25


def _safetensors():
    import numpy as np
    from safetensors.numpy import save

    return save({"a": np.ones(3, np.float32), "b": np.zeros((2, 2), np.float32)})


class TestTheGuard:
    """The guard detects all kinds of misbehavior."""

    @pytest.fixture
    def outcomes(self, tmp_path):
        cases = guard.run(("misbehaving",), 0, 8, tmp_path)
        return {outcome.number: outcome for outcome in cases}

    @pytest.mark.slow
    def test_every_kind_of_finding(self, outcomes):
        assert {number: outcome.how for number, outcome in outcomes.items()} == {
            0: "escaped",
            1: "crashed",
            2: "swelled",
            3: "acted",
            4: "acted",
            5: "acted",
            6: "refused",
            7: "read",
        }
