import numpy as np
import pytest

from hfseq.data.batches import RowRandom
from hfseq.objectives.mlm import gather_masked, mask_tokens, target_capacity

VOCAB, MASK, PAD = 1000, 4, 1
SPECIAL = np.arange(VOCAB) < 5


def make_rows(count, length, seed=0):
    """Returns rows of three documents with <s> and </s>, and padding at the end."""
    ids = np.random.default_rng(seed).integers(5, VOCAB, (count, length)).astype(np.int32)
    segments = np.zeros((count, length), np.int32)
    third = (length - 4) // 3
    for segment in range(3):
        start = segment * third
        segments[:, start : start + third] = segment + 1
        ids[:, start], ids[:, start + third - 1] = 0, 2
    ids[segments == 0] = PAD
    return {"input_ids": ids, "segment_ids": segments}


def mask(rows, seed=0, numbers=None, **options):
    numbers = np.arange(len(rows["input_ids"])) if numbers is None else numbers
    options = {"mask_id": MASK, "vocab_size": VOCAB, "special": SPECIAL} | options
    return mask_tokens(rows, RowRandom(seed, 0, numbers), **options)


def within(count, total, expected, sigmas=5):
    return abs(count - total * expected) < sigmas * (total * expected * (1 - expected)) ** 0.5


@pytest.mark.parametrize("probability", [0.15, 0.3])
def test_shares_are_those_of_the_paper(probability):
    rows = make_rows(400, 128)
    ids, labels = mask(rows, probability=probability)
    candidates = (rows["segment_ids"] > 0) & ~SPECIAL[rows["input_ids"]]
    is_selected = labels != -100
    total = int(is_selected.sum())
    assert within(total, candidates.sum(), probability)
    masked, remaining = ids[is_selected] == MASK, ids[is_selected] == labels[is_selected]
    assert within(masked.sum(), total, 0.8 + 0.1 / VOCAB)
    assert within(remaining.sum(), total, 0.1 + 0.1 / VOCAB)
    replaced = ids[is_selected][~masked & ~remaining]
    assert within((replaced < VOCAB // 2).sum(), len(replaced), 0.5)
    assert replaced.min() < 5 and replaced.max() > VOCAB - 20  # any id, special ones too
    assert ids.dtype == labels.dtype == np.int32


def test_only_real_tokens_are_masked():
    rows = make_rows(50, 64)
    ids, labels = mask(rows, probability=1.0)
    candidates = (rows["segment_ids"] > 0) & ~SPECIAL[rows["input_ids"]]
    np.testing.assert_array_equal(labels, np.where(candidates, rows["input_ids"], -100))
    np.testing.assert_array_equal(ids[~candidates], rows["input_ids"][~candidates])


def test_rows_that_only_fill_the_batch_have_no_targets():
    rows = make_rows(4, 64) | {"valid": np.array([True, False, True, False])}
    labels = mask(rows, probability=1.0)[1]
    assert (labels[[1, 3]] == -100).all() and (labels[[0, 2]] != -100).any()


def test_masking_does_not_depend_on_the_process():
    rows = make_rows(8, 64)
    full = mask(rows)
    part = {name: array[[5, 2]] for name, array in rows.items()}
    for a, b in zip(full, mask(part, numbers=np.array([5, 2])), strict=True):
        np.testing.assert_array_equal(a[[5, 2]], b)
    assert not np.array_equal(full[1], mask(rows, seed=1)[1])


def test_masking_does_not_depend_on_padding():
    rows = make_rows(4, 64)
    wider = {name: np.pad(array, ((0, 0), (0, 16))) for name, array in rows.items()}
    np.testing.assert_array_equal(mask(rows)[1], mask(wider)[1][:, :64])


def words_of(rows, starts):
    """(row, [columns]) of each word, by the definition."""
    words = []
    for row, (ids, segments) in enumerate(zip(rows["input_ids"], rows["segment_ids"], strict=True)):
        current = None
        for column, (token, segment) in enumerate(zip(ids, segments, strict=True)):
            if not segment or SPECIAL[token]:
                current = None
                continue
            same = current is not None and segments[current[1][-1]] == segment
            if same and not starts[row, column]:
                current[1].append(column)
            else:
                current = (row, [column])
                words.append(current)
    return words


@pytest.mark.parametrize("with_continues", [False, True])
def test_whole_words_are_masked(with_continues):
    rows = make_rows(200, 64)
    table = np.arange(VOCAB) % 3 == 0
    starts = table[rows["input_ids"]]
    if with_continues:
        rows["continues"] = (np.arange(200 * 64).reshape(200, 64) % 4 == 0).astype(np.int32)
        starts = starts & (rows["continues"] == 0)
    is_selected = mask(rows, word_starts=table)[1] != -100
    words = words_of(rows, starts)
    picked = [is_selected[row, columns] for row, columns in words]
    assert all(word.all() or not word.any() for word in picked)
    assert within(sum(word.all() for word in picked), len(words), 0.15)
    assert is_selected.sum() == sum(word.sum() for word in picked)
    assert any(len(word) > 1 and word.all() for word in picked)


def test_documents_without_special_tokens_do_not_share_words():
    rows = {
        "input_ids": np.full((300, 4), 7, np.int32),
        "segment_ids": np.tile(np.array([1, 1, 2, 2], np.int32), (300, 1)),
    }
    is_selected = mask(rows, word_starts=np.zeros(VOCAB, bool), probability=0.5)[1] != -100
    assert (is_selected[:, 0] == is_selected[:, 1]).all() and (
        is_selected[:, 2] == is_selected[:, 3]
    ).all()
    assert (is_selected[:, 1] != is_selected[:, 2]).any()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_every_target_is_gathered_once(groups):
    labels = mask(make_rows(16, 64))[1]
    positions, targets = gather_masked(labels, groups, 0.15)
    flat = labels.reshape(groups, -1)
    assert positions.shape == targets.shape == (groups, target_capacity(flat.shape[1], 0.15))
    for group in range(groups):
        real = targets[group] != -100
        assert positions[group][real].tolist() == np.flatnonzero(flat[group] != -100).tolist()
        assert (targets[group][real] == flat[group][positions[group][real]]).all()
        assert (positions[group][~real] == 0).all()


def test_target_buffer_grows_if_needed():
    labels = np.arange(256, dtype=np.int32).reshape(4, 64)
    positions, targets = gather_masked(labels, 2, 0.15)
    assert positions.shape[1] % 8 == 0
    assert sorted(targets[targets != -100].tolist()) == list(range(256))


def test_a_batch_without_targets_is_all_padding():
    positions, targets = gather_masked(np.full((2, 8), -100, np.int32), 2, 0.15)
    assert (targets == -100).all() and (positions == 0).all()


@pytest.mark.parametrize("tokens", [8, 100, 4096, 65536])
@pytest.mark.parametrize("probability", [0.01, 0.15, 0.5, 1.0])
def test_capacity_holds_five_deviations_and_no_more_than_all(tokens, probability):
    room = target_capacity(tokens, probability)
    mean, deviation = tokens * probability, (tokens * probability * (1 - probability)) ** 0.5
    assert room % 8 == 0 and room <= -(-tokens // 8) * 8
    assert room >= min(mean + 5 * deviation, tokens)
    assert room <= max(8, mean + 5 * deviation + 8)
