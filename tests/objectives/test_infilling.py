"""BART's noise compared with its definition: budgets, lengths, permutations and round trips."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hfseq.data.batches import RowRandom
from hfseq.objectives.denoising import infill, permute_sentences

BOS, PAD, EOS, MASK = 0, 1, 2, 4


def numbers(count, seed=0):
    return RowRandom(seed, 0, np.arange(count))


def make_rows(rows, length, documents=2, padding=0):
    """Returns rows of distinct tokens, with <s> … </s> around documents and padding at the end."""
    ids = np.broadcast_to(np.arange(10, 10 + length, dtype=np.int32), (rows, length)).copy()
    segments = np.zeros((rows, length), np.int32)
    each = (length - padding) // documents
    for number in range(documents):
        start = number * each
        stop = start + each if number < documents - 1 else length - padding
        segments[:, start:stop] = number + 1
        ids[:, start], ids[:, stop - 1] = BOS, EOS
    ids[segments == 0] = PAD
    return ids, (segments > 0) & (ids >= 10), segments


def fill(ids, ordinary, segments, random=None, **options):
    random = random or numbers(len(ids))
    return infill(ids, ordinary, segments, random, mask_id=MASK, pad=PAD, **options)


def gone(result):
    """Returns the number of tokens that each mask replaces. Tokens are consecutive numbers."""
    lengths = []
    for row in result.tolist():
        last = None
        for token in row:
            if token >= 10:
                lengths += [] if last is None else [token - last[0] - 1] * (last[1] == 1)
                last = (token, 0)
            elif last is not None:
                last = (last[0], last[1] + (token == MASK))
    return np.array(lengths)


@pytest.mark.parametrize("probability", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("length", [64, 512])
def test_each_row_loses_its_share_of_tokens(probability, length):
    ids, ordinary, segments = make_rows(400, length)
    result, _ = fill(ids, ordinary, segments, probability=probability)
    count = ordinary[0].sum()
    lost = count - ((result >= 10).sum(axis=1))
    assert abs(lost.mean() / count - probability) < 0.03 * probability
    # not the budget of a batch: no row is off by more than half of a long span
    assert np.abs(lost - probability * count).max() <= 8


@pytest.mark.parametrize("mean", [1.5, 3.0, 6.0])
def test_span_lengths_are_poisson_with_zeros_as_insertions(mean):
    rows = 400
    ids, ordinary, segments = make_rows(rows, 1024, documents=1)
    result, _ = fill(ids, ordinary, segments, probability=0.3, poisson_lambda=mean)
    lengths = gone(result)
    total = len(lengths)
    assert total > 0.9 * (result == MASK).sum()
    assert abs(lengths.mean() - mean) < 0.02 * mean
    for k in range(int(mean) + 3):
        expected = math.exp(-mean) * mean**k / math.factorial(k)
        error = 5 * math.sqrt(expected / total)
        # A row uses up its budget, which long spans near its end do not fit: a bias of order 1/n.
        assert abs((lengths == k).mean() - expected) < error + 0.02 * expected, k


def test_unmasked_tokens_keep_their_order():
    ids, ordinary, segments = make_rows(100, 96, documents=3, padding=7)
    result, documents = fill(ids, ordinary, segments)
    for row in range(100):
        remaining = result[row][(result[row] != MASK) & (documents[row] > 0)].tolist()
        source = iter(ids[row].tolist())
        assert all(token in source for token in remaining)  # a subsequence
        specials = [token for token in remaining if token < 10]
        assert specials == [BOS, EOS] * 3
        assert documents[row].tolist() == sorted(documents[row].tolist(), key=lambda s: (s == 0, s))
        for number in range(1, 4):  # documents keep their own tokens
            inside = result[row][documents[row] == number]
            original = ids[row][segments[row] == number]
            assert set(inside[inside >= 10]) <= set(original[original >= 10])
            assert inside[0] == BOS and inside[-1] == EOS
        assert (result[row][documents[row] == 0] == PAD).all()


def test_rows_never_grow():
    for mean in (0.2, 1.0, 3.0):
        ids, ordinary, segments = make_rows(200, 48)
        result, documents = fill(ids, ordinary, segments, poisson_lambda=mean, probability=0.6)
        assert result.shape == ids.shape and ((documents > 0).sum(axis=1) <= 48).all()
        lost = ordinary.sum(axis=1) - (result >= 10).sum(axis=1)
        assert ((result == MASK).sum(axis=1) <= lost).all()


def test_span_positions_are_uniform():
    rows = 4000
    ids, ordinary, segments = make_rows(rows, 80, documents=1)
    result, _ = fill(ids, ordinary, segments)
    share = np.array([(result == token).any(axis=1).mean() for token in range(11, 89)])
    assert np.abs(1 - share[8:-8] - 0.3).max() < 0.05
    assert abs(1 - share.mean() - 0.3) < 0.01
    np.testing.assert_allclose(share, share[::-1], atol=0.05)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_mask_ratio_zero_and_one(probability):
    ids, ordinary, segments = make_rows(20, 40)
    result, _ = fill(ids, ordinary, segments, probability=probability)
    if probability:
        assert not (result >= 10).any() and (result == MASK).any(axis=1).all()
    else:
        np.testing.assert_array_equal(result, ids)


def test_tiny_and_empty_rows_are_served():
    ids, ordinary, segments = make_rows(3, 12, documents=1)
    ids[1], segments[1], ordinary[1] = PAD, 0, False  # an empty row
    ids[2, 1:], segments[2, 1:], ordinary[2] = PAD, 0, False  # a row with only a special token
    result, documents = fill(ids, ordinary, segments)
    assert (result[1] == PAD).all() and result[2].tolist() == ids[2].tolist()
    assert (documents[1:] == segments[1:]).all()


def test_a_row_is_noised_alike_in_any_company_and_width():
    ids, ordinary, segments = make_rows(6, 60)
    full = fill(ids, ordinary, segments)
    wide = [
        np.pad(a[[4, 1]], ((0, 0), (0, 30)), constant_values=v)
        for a, v in ((ids, PAD), (ordinary, False), (segments, 0))
    ]
    part = fill(*wide, random=RowRandom(0, 0, np.array([4, 1])))
    for a, b in zip(full, part, strict=True):
        np.testing.assert_array_equal(a[[4, 1]], b[:, :60])


# -- sentences -------------------------------------------------------------------------------------


def sentences_of(rows, length, seed=0, **options):
    """Returns rows and random sentence ends."""
    ids, ordinary, segments = make_rows(rows, length, **options)
    ends = (np.random.default_rng(seed).random(ids.shape) < 0.15) & ordinary
    return ids, ordinary, segments, ends


def permute(ids, ordinary, segments, ends, random=None, ratio=1.0):
    real = segments > 0
    random = random or numbers(len(ids))
    return permute_sentences(real, real & ~ordinary, segments, ends, random, ratio)


def cut(row, segments, ordinary, ends):
    """Returns the sentences of one row by the definition: lists of columns, by document."""
    documents: dict[int, list[list[int]]] = {}
    current: list[int] = []
    for column in range(len(row)):
        if not ordinary[column]:
            current = []
            continue
        actual = documents.setdefault(int(segments[column]), [])
        if not current:
            actual.append(current)
        current.append(column)
        if ends[column]:
            current = []
    return documents


def test_sentences_are_permuted_within_their_document():
    ids, ordinary, segments, ends = sentences_of(60, 90, documents=3, padding=5)
    columns = permute(ids, ordinary, segments, ends)
    moved = 0
    for row in range(60):
        assert sorted(columns[row]) == list(range(90))  # a permutation
        fixed = ~ordinary[row]
        assert (columns[row][fixed] == np.arange(90)[fixed]).all()
        order = columns[row].tolist()
        for number, sentences in cut(ids[row], segments[row], ordinary[row], ends[row]).items():
            inside = [c for c in order if segments[row, c] == number and ordinary[row, c]]
            left = {sentence[0]: sentence for sentence in sentences}
            while inside:
                sentence = left.pop(inside[0])  # begins with the beginning of one
                assert inside[: len(sentence)] == sentence
                inside = inside[len(sentence) :]
            assert not left
            moved += 1
    assert moved == 180
    assert (columns != np.arange(90)).any(axis=1).all()


def test_all_orders_are_equally_likely():
    rows = 12_000
    ids, ordinary, segments = make_rows(rows, 14, documents=1)
    ends = np.zeros_like(ordinary)
    ends[:, [3, 6, 9]] = True  # four sentences of three tokens
    columns = permute(ids, ordinary, segments, ends)
    orders, counts = np.unique(columns[:, 1:-1:3], axis=0, return_counts=True)
    assert len(orders) == 24
    assert ((counts - 500) ** 2 / 500).sum() < 23 + 5 * np.sqrt(46)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75])
def test_a_part_of_the_sentences_is_permuted(ratio):
    rows = 3000
    ids, ordinary, segments = make_rows(rows, 26, documents=1)
    ends = np.zeros_like(ordinary)
    ends[:, 3:24:3] = True  # eight sentences of three tokens
    columns = permute(ids, ordinary, segments, ends, ratio=ratio)
    moved = (columns[:, 1:-1:3] != np.arange(1, 25, 3)).sum(axis=1)
    assert moved.max() <= 8 * ratio
    is_selected = 8 * ratio  # a random order leaves one of them, on average, where it was
    assert abs(moved.mean() - max(is_selected - 1, 0)) < 0.15


def test_single_sentence_rows_are_unchanged():
    ids, ordinary, segments = make_rows(4, 30)
    columns = permute(ids, ordinary, segments, np.zeros_like(ordinary))
    assert (columns == np.arange(30)).all()
    empty = np.zeros((2, 5), np.int32)
    assert (permute(empty, empty > 0, empty, empty > 0) == np.arange(5)).all()


@pytest.mark.slow
def test_a_row_is_permuted_alike_in_any_company_and_width():
    ids, ordinary, segments, ends = sentences_of(6, 60)
    full = permute(ids, ordinary, segments, ends)
    wide = [np.pad(a[[4, 1]], ((0, 0), (0, 30))) for a in (ids, ordinary, segments, ends)]
    part = permute(*wide, random=RowRandom(0, 0, np.array([4, 1])))
    np.testing.assert_array_equal(full[[4, 1]], part[:, :60])
