"""Batches without duplicates, batches grouped by label, and mixtures of datasets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hfseq.data.batches import Batches
from hfseq.data.samplers import (
    GroupByLabelBatches,
    MixedBatches,
    MixedRowBatches,
    MixedRows,
    NoDuplicatesBatches,
    counts_per_epoch,
)
from hfseq.errors import DataError, UsageError


class Numbers:
    """Rows that contain a number, starting from ``first``."""

    def __init__(self, count: int, first: int = 0):
        self.numbers = np.arange(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    def width(self, indices: np.ndarray) -> int:
        return 1

    def fetch(self, indices: np.ndarray, width: Any = None) -> dict[str, np.ndarray]:
        return {"input_ids": self.numbers[indices][:, None]}


def epoch_rows(batches: Batches, epoch: int) -> list[np.ndarray]:
    steps = range(epoch * len(batches), (epoch + 1) * len(batches))
    return [indices[valid] for indices, valid in map(batches.indices, steps)]


def test_no_value_occurs_twice_in_a_batch():
    random = np.random.default_rng(0)
    values = random.integers(0, 60, (100, 2))
    values[::7, 1] = values[::7, 0]  # a row may repeat its own value
    batches = NoDuplicatesBatches(Numbers(100), values, 8, seed=3)
    assert len(batches) == 13
    for epoch in (0, 1):
        used = Counter[int]()
        for rows in epoch_rows(batches, epoch):
            parts = [set(values[row]) for row in rows]
            assert sum(map(len, parts)) == len(set().union(*parts))
            used.update(rows.tolist())
        assert max(used.values()) == 1 and len(used) > 90
    first, second = (np.concatenate(epoch_rows(batches, epoch)) for epoch in (0, 1))
    assert first.tolist() != second.tolist()
    # A batch depends on the seed and the step only.
    again = NoDuplicatesBatches(Numbers(100), values, 8, seed=3)
    for step in (20, 3, 14):
        assert again.indices(step)[0].tolist() == batches.indices(step)[0].tolist()


def test_batches_are_partial_if_all_values_are_equal():
    batches = NoDuplicatesBatches(Numbers(6), np.zeros((6, 1), np.int64), 3, seed=0)
    assert [len(rows) for rows in epoch_rows(batches, 0)] == [1, 1]


def test_batches_by_label_have_pairs_of_several_labels():
    labels = np.repeat([0, 1, 2, 3], [20, 9, 6, 1])
    batches = GroupByLabelBatches(Numbers(36), labels, 6, seed=1)
    # The second largest label has 4 pairs: 4 + 4 + 3 pairs of three labels.
    assert len(batches) == 22 // 6
    for epoch in range(3):
        rows = epoch_rows(batches, epoch)
        assert len(set(np.concatenate(rows).tolist())) == 18
        for batch in rows:
            counts = Counter(labels[batch].tolist())
            assert len(counts) >= 2 and min(counts.values()) >= 2


@pytest.mark.parametrize(
    ("labels", "size", "error", "message"),
    [
        ([0, 0, 1, 1], 5, UsageError, "even batch size"),
        ([0, 0, 0, 0], 4, DataError, "two labels"),
        ([0, 0, 1, 1], 8, DataError, "smaller batch size"),
    ],
)
def test_labels_that_do_not_fill_batches_are_errors(labels, size, error, message):
    with pytest.raises(error, match=message):
        GroupByLabelBatches(Numbers(4), np.array(labels), size, seed=0)


def test_counts_of_a_mixture():
    assert counts_per_epoch([6, 3], "proportional", []) == [6, 3]
    assert counts_per_epoch([6, 3], "round_robin", []) == [3, 3]
    assert counts_per_epoch([6, 4], "weighted", [1, 3]) == [3, 7]
    assert sum(counts_per_epoch([5, 5, 5], "weighted", [1, 1, 2])) == 15


@pytest.mark.parametrize("strategy", ["proportional", "round_robin", "weighted"])
def test_mixed_batches_have_rows_of_one_dataset(strategy):
    parts = [Batches(Numbers(12), 4, seed=0), Batches(Numbers(20, 100), 4, seed=0)]
    mixed = MixedBatches(parts, strategy, [3, 1], seed=5)
    expected = {"proportional": [3, 5], "round_robin": [3, 3], "weighted": [6, 2]}[strategy]
    counts = Counter[int]()
    for step in range(2 * len(mixed)):
        batch = mixed[step]
        dataset = batch["dataset"][0]
        assert ((batch["input_ids"] >= 100) == dataset).all()
        counts[int(dataset)] += 1
    assert [counts[0], counts[1]] == [2 * count for count in expected]
    if strategy == "proportional":  # an epoch contains each row once
        rows = np.concatenate([mixed[step]["input_ids"].ravel() for step in range(8)])
        assert sorted(rows.tolist()) == [*range(12), *range(100, 120)]
    if strategy == "round_robin":
        assert [mixed.turn(step) for step in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_mixed_rows_use_all_rows_of_a_dataset_equally_often():
    rows = MixedRows([Numbers(30), Numbers(10, 100)])
    batches = MixedRowBatches(rows, 8, "weighted", [1, 3], seed=2)
    assert batches.counts == [10, 30] and len(batches) == 5
    numbers = []
    for step in range(15):  # three epochs
        batch = batches[step]
        numbers += batch["input_ids"][batch["valid"], 0].tolist()
    counts = Counter(numbers)
    assert {counts[number] for number in range(30)} == {1}
    assert {counts[number] for number in range(100, 110)} == {9}
    epoch = [batches[step]["input_ids"] for step in range(5)]
    assert all((part < 100).any() and (part >= 100).any() for part in epoch)
