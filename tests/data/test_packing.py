import numpy as np
import pytest

from hfseq.data.batches import LineRows, PackedRows
from hfseq.data.store import TokenStore

PAD = 1


def make_store(lengths, continues=False):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(10, 10 + offsets[-1], dtype=np.int32)
    marks = (np.arange(len(tokens)) % 3 == 0).astype(np.uint8) if continues else None
    return TokenStore(tokens, offsets, PAD, marks)


def packed_slowly(store, length, row):
    """Packs token by token, as defined."""
    ids, segments, positions = [], [], []
    segment, position = 0, 0
    for column in range(length):
        index = row * length + column
        if index >= store.total_tokens:
            ids.append(PAD), segments.append(0), positions.append(0)
            continue
        begins = index in store.offsets
        segment += begins or column == 0
        position = 0 if begins or column == 0 else position + 1
        ids.append(int(store.tokens[index])), segments.append(segment), positions.append(position)
    return ids, segments, positions


@pytest.mark.parametrize("seed", range(12))
def test_packed_rows_equal_their_definition(seed):
    chooser = np.random.default_rng(seed)
    store = make_store(chooser.integers(1, 12, chooser.integers(1, 30)))
    length = int(chooser.integers(1, 20))
    rows = PackedRows(store, length)
    assert len(rows) == -(-store.total_tokens // length)
    order = chooser.permutation(len(rows))
    batch = rows.fetch(order)
    for i, row in enumerate(order):
        ids, segments, positions = packed_slowly(store, length, row)
        assert batch["input_ids"][i].tolist() == ids
        assert batch["segment_ids"][i].tolist() == segments
        assert batch["position_ids"][i].tolist() == positions
    assert all(array.dtype == np.int32 for array in batch.values())


def test_no_token_is_lost():
    store = make_store([5, 9, 2])
    rows = PackedRows(store, 7)
    batch = rows.fetch(np.arange(len(rows)))
    assert batch["input_ids"][batch["segment_ids"] > 0].tolist() == store.tokens.tolist()


def test_continuations_travel_along():
    store = make_store([5, 9], continues=True)
    batch = PackedRows(store, 4).fetch(np.array([0, 3]))
    assert batch["continues"].tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]
    assert LineRows(store, 6).fetch(np.array([0]))["continues"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert "continues" not in PackedRows(make_store([3]), 2).fetch(np.array([0]))


def test_lines_are_one_document_each():
    rows = LineRows(make_store([3, 5]), 4, pad_to_max_length=True)
    batch = rows.fetch(np.array([1, 0]))
    assert batch["input_ids"].tolist() == [[13, 14, 15, 16], [10, 11, 12, PAD]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]


@pytest.mark.parametrize("max_length", [1, 5, 8, 30, 128, 512])
def test_widths_are_four_at_most_and_hold_every_row(max_length):
    rows = LineRows(make_store(np.arange(1, 600)), max_length)
    assert len(rows.widths) <= 4 and rows.widths[-1] == max_length
    for document in range(0, 599, 13):
        width = rows.fetch(np.array([document, 0]))["input_ids"].shape[1]
        assert width in rows.widths and width >= min(document + 1, max_length)


def test_a_part_of_a_batch_can_be_as_wide_as_the_batch():
    rows = LineRows(make_store([3, 60]), 64)
    both = np.array([0, 1])
    assert rows.fetch(both[:1])["input_ids"].shape == (1, 16)
    assert rows.fetch(both[:1], rows.width(both))["input_ids"].shape == (1, 64)


def next_slowly(store, length, row, cross_documents):
    index = min((row + 1) * length, store.total_tokens)
    ends = index >= store.total_tokens or (index in store.offsets and not cross_documents)
    return -1 if ends else int(store.tokens[index])


@pytest.mark.parametrize("cross_documents", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_knows_the_token_that_follows_it_in_its_document(seed, cross_documents):
    chooser = np.random.default_rng(seed)
    store = make_store(chooser.integers(1, 9, 30))
    rows = PackedRows(store, int(chooser.integers(1, 12)), cross_documents)
    actual = rows.fetch(np.arange(len(rows)))["next_ids"].tolist()
    assert actual == [
        next_slowly(store, rows.length, row, cross_documents) for row in range(len(rows))
    ]


def test_across_documents_a_row_is_one_sequence():
    batch = PackedRows(make_store([3, 5, 2]), 4, cross_documents=True).fetch(np.arange(3))
    assert batch["segment_ids"].tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]


def test_tokens_beyond_those_that_make_rows_are_only_predicted():
    rows = PackedRows(make_store([9]), 4, tokens=8)
    assert len(rows) == 2
    batch = rows.fetch(np.arange(2))
    assert batch["next_ids"].tolist() == [14, 18] and batch["segment_ids"].all()
