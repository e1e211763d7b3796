"""Several pairs a row: which go together, and the rows they make."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfseq.data.batches import derive, permute
from hfseq.data.pair_store import PairStore, PairSums, Side, padded_sums, place

GROUP = 2048  # pairs that share rows


class PackedPairs:
    """Rows of several pairs, each of which has its source and its target in the same row.

    Pairs are shuffled (files are often sorted), cut into groups, and each group is packed by itself
    so that both sides fit. The plan is a function of the lengths alone. Segments count the pairs of
    a row from 1 on both sides; see ``Rows`` for the arrays, which "target_ids",
    "target_segment_ids" and "target_position_ids" join.
    """

    def __init__(self, pairs: PairStore):
        self.pairs = pairs
        self.room = (pairs.source.max_length, pairs.target.max_length)
        row_of, count = plan(*pairs.lengths, self.room)
        order = np.argsort(row_of, kind="stable")
        self.order = pairs.kept[order]
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def fill(self) -> tuple[float, float]:
        """Share of the rows' source and target columns that hold tokens."""
        source, target = (
            float(lengths.sum()) / (len(self) * width)
            for lengths, width in zip(self.pairs.lengths, self.room, strict=True)
        )
        return source, target

    @property
    def sums(self) -> PairSums:
        """The pairs' own lengths."""
        return self.pairs.sums

    @property
    def padded_sums(self) -> PairSums:
        """The same of the rows, as wide as they are."""
        return padded_sums(len(self), self.room)

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Columns of the source and of the target: always the greatest lengths."""
        return self.room

    def fetch(self, indices: np.ndarray, width: Any = None) -> dict[str, np.ndarray]:
        """Copy these rows out."""
        indices = np.asarray(indices)
        counts = self.offsets[indices + 1] - self.offsets[indices]
        rows = np.repeat(np.arange(len(indices)), counts)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = self.order[self.offsets[indices][rows] + rank]
        source, target = (
            _packed(side, rows, rank, chosen, (len(indices), columns))
            for side, columns in zip(self.pairs.sides, self.room, strict=True)
        )
        found = {f"target_{name}": array for name, array in target.items()}
        return {"input_ids": source.pop("ids"), **source, **found}


def _packed(
    side: Side, rows: np.ndarray, rank: np.ndarray, chosen: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Lay out one side; ``rows`` and ``rank`` say where each of the ``chosen`` pairs stands."""
    lengths = side.lengths[chosen].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    first = np.flatnonzero(rank == 0)
    starts = before - before[first][rows]
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    flat = np.repeat(rows * shape[1] + starts, lengths) + within
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments.reshape(-1)[flat] = np.repeat(rank + 1, lengths)
    positions.reshape(-1)[flat] = within
    ids = place(side, rows, starts, chosen, shape)
    return {"ids": ids, "segment_ids": segments, "position_ids": positions}


def plan(
    source: np.ndarray, target: np.ndarray, room: tuple[int, int], group: int = GROUP
) -> tuple[np.ndarray, int]:
    """Say which row each pair goes to: first fit by falling length, in all groups at once.

    ``source`` and ``target`` are lengths (pairs,), none above ``room``. Returns rows, int64
    (pairs,), and how many there are.
    """
    total = len(source)
    groups = -(-total // group)
    each = -(-total // groups)
    order = permute(np.arange(total), total, derive("pairs"))
    # Groups are columns; places that are left over in the last ones hold pairs of no length.
    filled = np.full(groups * each, -1, np.int64)
    filled[:total] = order
    members = filled.reshape(groups, each)
    lengths = [np.where(members < 0, 0, side[members]) for side in (source, target)]
    size = np.maximum(lengths[0] / room[0], lengths[1] / room[1])
    falling = np.argsort(-size, axis=1, kind="stable")
    members = np.take_along_axis(members, falling, axis=1)
    lengths = [np.take_along_axis(side, falling, axis=1) for side in lengths]
    rows = _first_fit(lengths[0], lengths[1], room)
    numbers = rows + np.arange(groups)[:, None] * (rows.max() + 1)
    real = members >= 0
    used, compact = np.unique(numbers[real], return_inverse=True)
    row_of = np.empty(total, np.int64)
    row_of[members[real]] = compact
    return row_of, len(used)


def _first_fit(source: np.ndarray, target: np.ndarray, room: tuple[int, int]) -> np.ndarray:
    """Put the pairs of each group, (groups, pairs), into the first row with room for both sides."""
    groups, each = source.shape
    rows = np.zeros((groups, each), np.int64)
    kind = np.int16 if max(room) < 2**15 else np.int32
    source, target = source.astype(kind), target.astype(kind)
    free = [np.full((groups, 64), size, kind) for size in room]
    opened, every = 1, np.arange(groups)
    for number in range(each):
        if opened == free[0].shape[1]:
            free = [
                np.concatenate([left, np.full_like(left, size)], axis=1)
                for left, size in zip(free, room, strict=True)
            ]
        needs = source[:, number], target[:, number]
        window = opened + 1
        fits = free[0][:, :window] >= needs[0][:, None]
        fits &= free[1][:, :window] >= needs[1][:, None]
        chosen = fits.argmax(axis=1)
        free[0][every, chosen] -= needs[0]
        free[1][every, chosen] -= needs[1]
        rows[:, number] = chosen
        opened = max(opened, int(chosen.max()) + 1)
    return rows
