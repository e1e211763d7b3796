"""Windows of rows, and continuous streams: the tokens of each step as a function of the step."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.batches import ContinuousBatches, PackedRows, WindowBatches
from hfseq.data.sources import ByteArrayRows
from hfseq.data.store import TokenStore
from hfseq.errors import UsageError


def packed(total, length):
    tokens = np.arange(100, 100 + total, dtype=np.int32)
    return PackedRows(TokenStore(tokens, np.array([0, total])), length, True)


def test_a_step_gets_the_next_window_of_the_same_rows():
    rows = packed(8 * 7, 8)
    batches = WindowBatches(rows, batch_size=3, seed=1, windows=4)
    assert len(batches) == 12
    for epoch in range(2):
        visited = []
        for sequence in range(3):
            first = epoch * 12 + sequence * 4
            parts = [batches[step] for step in range(first, first + 4)]
            order, valid = batches.indices(first)
            full = rows.fetch(order)
            ids = np.concatenate([part["input_ids"] for part in parts], 1)
            assert np.array_equal(ids, full["input_ids"])
            assert [part["fresh"].all() for part in parts] == [True, False, False, False]
            assert all(np.array_equal(part["valid"], valid) for part in parts)
            assert (parts[0]["previous_ids"] == -1).all()
            for previous, following in zip(parts, parts[1:], strict=False):
                assert np.array_equal(following["previous_ids"], previous["input_ids"][:, -1])
                assert np.array_equal(previous["next_ids"], following["input_ids"][:, 0])
            assert np.array_equal(parts[-1]["next_ids"], full["next_ids"])
            visited += order[valid].tolist()
        assert sorted(visited) == list(range(7))
    assert not np.array_equal(batches.indices(0)[0], batches.indices(12)[0])


def test_short_row_ends_with_its_last_token():
    rows = packed(8 + 4, 8)  # the second row has four tokens
    batches = WindowBatches(rows, batch_size=2, seed=0, windows=2)
    position = batches.indices(0)[0].tolist().index(1)
    first, second = batches[0], batches[1]
    assert first["next_ids"][position] == -1
    assert (second["segment_ids"][position] == 0).all()


def test_streams_continue_and_restart_at_the_end():
    rows = packed(4 * 10 - 1, 4)
    batches = ContinuousBatches(rows, batch_size=3, seed=0)
    assert len(batches) == 4
    read = [batches.indices(step) for step in range(12)]
    numbers = np.stack([order for order, _ in read])
    valid = np.stack([real for _, real in read])
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, None, None]
    for position in range(3):
        actual = [
            int(n) if v else None
            for n, v in zip(numbers[:, position], valid[:, position], strict=True)
        ]
        assert actual == text[position * 4 :] + text[: position * 4]
    first, second = batches[0], batches[1]
    assert first["fresh"].tolist() == [True, False, False]
    assert first["previous_ids"].tolist() == [-1, 115, 131]
    assert np.array_equal(second["previous_ids"], first["input_ids"][:, -1])
    again = batches[8]  # the second position has passed the two missing rows
    assert again["fresh"].tolist() == [False, True, False] and again["previous_ids"][1] == -1


def test_images_have_no_stream():
    images = ByteArrayRows.__new__(ByteArrayRows)
    images.arrays = np.zeros((4, 2))
    with pytest.raises(UsageError, match="rows are independent"):
        ContinuousBatches(images, 2, 0)
