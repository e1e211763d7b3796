"""Packing of pairs: every pair once, both sides fit, and little padding."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.pairs import PackedPairs, PairSide, plan_rows, select_pairs
from hfseq.data.store import TokenStore

ROOM = (64, 48)


def lengths(count=3000, seed=0):
    """Skewed, correlated lengths of both sides, sorted as files often are."""
    draw = np.random.default_rng(seed)
    base = draw.lognormal(np.log(12), 0.6, count)
    source = np.clip(base * draw.normal(1, 0.15, count), 1, ROOM[0]).astype(np.int64)
    target = np.clip(0.75 * base * draw.normal(1, 0.2, count), 1, ROOM[1]).astype(np.int64)
    order = np.argsort(source)
    return source[order], target[order]


def store_of(sizes, pad=0, first=1):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return TokenStore(np.arange(first, first + offsets[-1], dtype=np.int32), offsets, pad)


def pairs_of(count=300):
    source, target = lengths(count)
    sides = [PairSide(store_of(s), n) for s, n in zip((source, target), ROOM, strict=True)]
    return select_pairs(*sides, drop_long=False)


def next_fit(source, target):
    """Packs like the reference implementation: one open row, pairs in the order of the data."""
    rows, left = 1, list(ROOM)
    for sizes in zip(source.tolist(), target.tolist(), strict=True):
        if any(size > free for size, free in zip(sizes, left, strict=True)):
            rows, left = rows + 1, list(ROOM)
        left = [free - size for size, free in zip(sizes, left, strict=True)]
    return rows


@pytest.mark.parametrize("group", [7, 100, 2048])
@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 3000])
def test_both_sides_of_every_pair_fit_into_its_row(count, group):
    source, target = lengths(count)
    rows, total = plan_rows(source, target, ROOM, group)
    assert rows.shape == (count,) and set(rows.tolist()) == set(range(total))
    for side, room in zip((source, target), ROOM, strict=True):
        assert np.bincount(rows, side).max() <= room


def test_rows_are_fuller_than_those_of_next_fit():
    source, target = lengths()
    rows, total = plan_rows(source, target, ROOM)
    bound = max(source.sum() / ROOM[0], target.sum() / ROOM[1])
    assert bound / total > 0.97 > 0.9 > bound / next_fit(source, target)


def test_the_plan_is_a_function_of_the_lengths():
    source, target = lengths()
    assert np.array_equal(plan_rows(source, target, ROOM)[0], plan_rows(source, target, ROOM)[0])


def test_packing_shuffles_neighbors():
    source, target = lengths()
    rows, _ = plan_rows(source, target, ROOM)
    assert (rows[1:] == rows[:-1]).mean() < 0.05


def test_rows_hold_the_same_pairs_on_both_sides_each_once():
    store = pairs_of()
    packed = PackedPairs(store)
    rows = packed.fetch(np.arange(len(packed)))
    assert rows["input_ids"].shape == (len(packed), 64) and rows["target_ids"].shape[1] == 48
    visited = {}
    for name, side in zip(("", "target_"), store.sides, strict=True):
        ids, segments = rows[f"{name}ids" if name else "input_ids"], rows[f"{name}segment_ids"]
        assert (ids[segments == 0] == 0).all()
        for row in range(len(packed)):
            remaining = segments[row] > 0
            assert not remaining[int(remaining.sum()) :].any()  # padding is at the end
            for segment in range(1, segments[row].max() + 1):
                inside = segments[row] == segment
                tokens = ids[row][inside]
                pair = int(np.searchsorted(side.store.offsets, tokens[0] - 1))
                np.testing.assert_array_equal(tokens, side.store[pair])
                positions = rows[f"{name}position_ids"][row][inside]
                np.testing.assert_array_equal(positions, np.arange(len(tokens)))
                visited.setdefault(pair, []).append((row, segment))
    assert len(visited) == len(store) and all(
        len(positions) == 2 and positions[0] == positions[1] for positions in visited.values()
    )


def test_a_part_of_the_rows_is_that_part_of_all_rows():
    packed = PackedPairs(pairs_of())
    full, some = packed.fetch(np.arange(len(packed))), packed.fetch(np.array([5, 2, 5]))
    for name, array in some.items():
        np.testing.assert_array_equal(array, full[name][[5, 2, 5]])
        assert array.dtype == np.int32


@pytest.mark.slow
def test_sums_and_fill_are_those_of_the_rows():
    store = pairs_of()
    packed = PackedPairs(store)
    rows = packed.fetch(np.arange(len(packed)))
    fill_ratios = [(rows[f"{name}segment_ids"] > 0).mean() for name in ("", "target_")]
    assert packed.fill_ratio == pytest.approx(fill_ratios)
    source, target = (lengths.astype(float) for lengths in store.lengths)
    assert packed.sums == (
        source.sum(),
        target.sum(),
        (source**2).sum(),
        (target**2).sum(),
        (source * target).sum(),
    )
    assert packed.padded_sums[:2] == (64 * len(packed), 48 * len(packed))
    assert packed.padded_sums.products == 64 * 48 * len(packed)
