"""Batches that depend on the content of their rows, and batches of several datasets.

As in `hfseq.data.batches.Batches`, the batch of each step is a pure function of the seed and the
step. To continue an interrupted run, only the number of the step is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from hfseq.data.batches import Batches, Rows, derive_key, permute
from hfseq.errors import DataError, UsageError

#: Number of epochs whose plans are kept in memory. Batches are loaded ahead of time, so batches of
#: two epochs can be needed at the same time.
KEPT_EPOCHS = 2


class PlannedBatches(Batches):
    """Base class of batches for which the rows of a whole epoch are selected at once.

    Args:
        rows: The rows.
        batch_size: Rows per batch.
        seed: Seed of the order.
        steps: Number of steps per epoch.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, steps: int):
        super().__init__(rows, batch_size, seed)
        self.steps = steps
        self._plans: OrderedDict[int, np.ndarray] = OrderedDict()

    def plan(self, epoch: int) -> Iterable[Sequence[int]]:
        """Yields the row numbers of each batch of an epoch, at most ``batch_size`` per batch.

        Batches after the last step of the epoch are ignored.
        """
        raise NotImplementedError

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the rows of a step, and whether each row is valid."""
        epoch, position = divmod(step, self.steps)
        if epoch not in self._plans:
            self._plans[epoch] = self._make_plan(epoch)
            while len(self._plans) > KEPT_EPOCHS:
                self._plans.popitem(last=False)
        planned = self._plans[epoch][position]
        valid = planned >= 0
        # The batch is padded with copies of its first row.
        return np.where(valid, planned, planned[0]), valid

    def _make_plan(self, epoch: int) -> np.ndarray:
        plan = np.full((self.steps, self.batch_size), -1, np.int64)
        for batch, rows in zip(plan, self.plan(epoch), strict=False):
            batch[: len(rows)] = rows
        return plan

    def order(self, epoch: int) -> np.ndarray:
        """Returns a permutation of the rows that depends on (seed, epoch)."""
        key = derive_key("epoch", self.seed, epoch)
        return permute(np.arange(len(self.rows)), len(self.rows), key)


class NoDuplicatesBatches(PlannedBatches):
    """Batches in which no text occurs in two rows.

    This is sentence-transformers' sampler ``no_duplicates``. A row is deferred to a later batch if
    one of its texts is already in the current batch, even in another column. Batches that cannot
    be filled without duplicates are used last. Rows for which no batch is left in an epoch are not
    used in this epoch.

    Args:
        rows: The rows.
        values: A hash of each text, `(rows, texts)`. Equal hashes stand for equal texts.
        batch_size: Rows per batch.
        seed: Seed of the order.

    Raises:
        DataError: The data has no rows.
    """

    def __init__(self, rows: Rows, values: np.ndarray, batch_size: int, seed: int):
        super().__init__(rows, batch_size, seed, -(-len(rows) // batch_size))
        self.values = [frozenset(row) for row in values.tolist()]

    def plan(self, epoch: int) -> Iterator[list[int]]:
        """Yields the row numbers of each batch of an epoch."""
        partial: list[list[int]] = []
        remaining = deque(self.order(epoch).tolist())
        while remaining:
            batch: list[int] = []
            waiting: list[int] = []
            batch_values: set[Hashable] = set()
            while remaining and len(batch) < self.batch_size:
                row = remaining.popleft()
                if self.values[row].isdisjoint(batch_values):
                    batch.append(row)
                    batch_values |= self.values[row]
                else:
                    waiting.append(row)
            remaining.extendleft(reversed(waiting))
            if len(batch) == self.batch_size:
                yield batch
            else:
                partial.append(batch)
        yield from partial


class GroupByLabelBatches(PlannedBatches):
    """Batches with at least two labels and at least two rows per label, for triplet losses.

    This is sentence-transformers' sampler ``group_by_label``. In each round, two rows of every
    label are added to the batches, in a random order of the labels. The rounds end when only one
    label has rows left. These rows are not used in the epoch. Labels with a single row are never
    used.

    Args:
        rows: The rows.
        labels: The label of each row, `(rows,)`.
        batch_size: Rows per batch, an even number of at least 4.
        seed: Seed of the order.

    Raises:
        UsageError: The batch size is odd or less than 4.
        DataError: Fewer than two labels have at least two rows, or there are too few rows for a
            batch.
    """

    def __init__(self, rows: Rows, labels: np.ndarray, batch_size: int, seed: int):
        if batch_size < 4 or batch_size % 2:
            raise UsageError(
                f"--batch_sampler group_by_label requires an even batch size of at least 4, not "
                f"{batch_size}"
            )
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self.groups = [group for group in groups if len(group) >= 2]
        if len(self.groups) < 2:
            raise DataError(
                "--batch_sampler group_by_label requires at least two labels with two examples "
                f"each, but only {len(self.groups)} of {len(groups)} labels have two examples"
            )
        pairs = sorted((len(group) // 2 for group in self.groups), reverse=True)
        usable = 2 * sum(min(count, pairs[1]) for count in pairs)
        if usable < batch_size:
            raise DataError(
                f"--batch_sampler group_by_label can use {usable} examples, which do not fill a "
                f"batch of {batch_size}: use a smaller batch size"
            )
        super().__init__(rows, batch_size, seed, usable // batch_size)

    def plan(self, epoch: int) -> Iterator[list[int]]:
        """Yields the row numbers of each batch of an epoch."""
        queues = []
        for number, group in enumerate(self.groups):
            key = derive_key("group", self.seed, epoch, number)
            order = group[permute(np.arange(len(group)), len(group), key)].tolist()
            queues.append(deque(order[: len(order) // 2 * 2]))
        remaining, batch, last, turn = list(range(len(queues))), list[int](), None, 0
        while len(remaining) >= 2:
            key = derive_key("turn", self.seed, epoch, turn)
            order = permute(np.arange(len(remaining)), len(remaining), key)
            remaining, turn = [remaining[i] for i in order.tolist()], turn + 1
            if batch and remaining[0] == last:
                # The last label of the previous round must not be the first of this round, because
                # a batch of four rows could otherwise have only one label.
                remaining[:2] = reversed(remaining[:2])
            for number in remaining:
                batch += [queues[number].popleft(), queues[number].popleft()]
                if len(batch) == self.batch_size:
                    yield batch
                    batch = []
            last = remaining[-1]
            remaining = [number for number in remaining if queues[number]]


Strategy = Literal["proportional", "round_robin", "weighted"]


def counts_per_epoch(
    sizes: Sequence[int], strategy: Strategy, weights: Sequence[float]
) -> list[int]:
    """Returns how many batches or rows of each dataset are used in an epoch of a mixture.

    Args:
        sizes: Number of batches or rows of each dataset.
        strategy: "proportional" uses each dataset completely. "round_robin" uses all datasets
            equally often until the smallest one is used up. "weighted" divides the sum of the sizes
            in proportion to the weights.
        weights: The weight of each dataset.
    """
    if strategy == "round_robin":
        return [min(sizes)] * len(sizes)
    if strategy == "proportional":
        return list(sizes)
    shares = np.asarray(weights, np.float64) / sum(weights) * sum(sizes)
    # Shares are rounded down, and those with the largest remainders up, so that their sum is exact.
    counts = np.floor(shares).astype(np.int64)
    for index in np.argsort(counts - shares, kind="stable")[: sum(sizes) - int(counts.sum())]:
        counts[index] += 1
    return counts.tolist()


class MixedBatches(Batches):
    """Batches of several datasets. Each batch contains rows of one dataset only.

    Losses that compare the rows of a batch therefore only compare rows of the same dataset. The
    batches of each dataset are used in order. A new epoch of the mixture continues with the next
    batch of each dataset.

    Args:
        parts: The batches of each dataset. All have the same batch size.
        strategy: How often each dataset is used, as in :func:`counts_per_epoch`.
        weights: The weights of the datasets, for the strategy "weighted".
        seed: Seed of the order of the datasets.
    """

    def __init__(
        self, parts: Sequence[Batches], strategy: Strategy, weights: Sequence[float], seed: int
    ):
        self.parts, self.strategy, self.seed = parts, strategy, seed
        self.rows, self.batch_size = parts[0].rows, parts[0].batch_size
        self.counts = counts_per_epoch([len(part) for part in parts], strategy, weights)
        self.steps = sum(self.counts)
        self._turns: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def turn(self, step: int) -> tuple[int, int]:
        """Returns the number of a step's dataset, and the step among the batches of the dataset."""
        epoch, position = divmod(step, self.steps)
        if self.strategy == "round_robin":
            return position % len(self.parts), step // len(self.parts)
        if epoch not in self._turns:
            self._turns[epoch] = self._make_turns(epoch)
            while len(self._turns) > KEPT_EPOCHS:
                self._turns.popitem(last=False)
        datasets, ranks = self._turns[epoch]
        dataset = int(datasets[position])
        return dataset, epoch * self.counts[dataset] + int(ranks[position])

    def _make_turns(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Selects the dataset of each step of an epoch.

        Returns:
            The number of the dataset of each step, and how many earlier steps of the epoch use the
            same dataset.
        """
        listed = np.repeat(np.arange(len(self.parts)), self.counts)
        order = permute(np.arange(self.steps), self.steps, derive_key("mix", self.seed, epoch))
        datasets, ranks = listed[order], np.empty(self.steps, np.int64)
        for dataset, count in enumerate(self.counts):
            ranks[datasets == dataset] = np.arange(count)
        return datasets, ranks

    def fetch(self, step: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows of a step's batch. "dataset" contains the number of their dataset."""
        dataset, own_step = self.turn(step)
        rows = self.parts[dataset].fetch(own_step, part)
        return rows | {"dataset": np.full(len(part), dataset, np.int32)}


class MixedRows:
    """The rows of several datasets as one sequence, for batches that mix datasets.

    Args:
        parts: The rows of each dataset.
    """

    def __init__(self, parts: Sequence[Rows]):
        self.parts = parts
        self.offsets = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def max_runs(self) -> int | None:
        """Maximum number of segments per row, or `None` if it is unknown."""
        bounds = [getattr(part, "max_runs", None) for part in self.parts]
        known_bounds = [bound for bound in bounds if bound is not None]
        return max(known_bounds) if len(known_bounds) == len(bounds) else None

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        """Yields each dataset, the positions of its rows in `indices`, and their numbers in it."""
        indices = np.asarray(indices, np.int64)
        dataset = np.searchsorted(self.offsets, indices, side="right") - 1
        for number, part in enumerate(self.parts):
            positions = np.flatnonzero(dataset == number)
            if len(positions):
                yield part, positions, indices[positions] - self.offsets[number]

    def width(self, indices: np.ndarray) -> int:
        """Returns the width of a batch of these rows, which is the largest that a dataset needs."""
        return max(part.width(part_rows) for part, _, part_rows in self._split(indices))

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays that all datasets have, padded to ``width`` tokens."""
        width = width or self.width(indices)
        fetched = [
            (positions, part.fetch(part_rows, width))
            for part, positions, part_rows in self._split(indices)
        ]
        names = set.intersection(*(set(arrays) for _, arrays in fetched)) if fetched else set()
        result = {}
        for name in sorted(names):
            first = fetched[0][1][name]
            result[name] = np.empty((len(indices), *first.shape[1:]), first.dtype)
            for positions, arrays in fetched:
                result[name][positions] = arrays[name]
        return result


class MixedRowBatches(Batches):
    """Batches in which each row is drawn from one of several datasets.

    An epoch contains a fixed number of rows of each dataset (see :func:`counts_per_epoch`). If this
    number is smaller than the dataset, the next epoch continues with the rows that have not been
    used yet. All rows of a dataset are therefore used equally often.

    Args:
        rows: The rows of all datasets.
        batch_size: Rows per batch.
        strategy: How often each dataset is used, as in :func:`counts_per_epoch`.
        weights: The weights of the datasets, for the strategy "weighted".
        seed: Seed of the order.
    """

    def __init__(
        self,
        rows: MixedRows,
        batch_size: int,
        strategy: Strategy,
        weights: Sequence[float],
        seed: int,
    ):
        super().__init__(rows, batch_size, seed)
        self.mixed = rows
        self.sizes = [len(part) for part in rows.parts]
        self.counts = counts_per_epoch(self.sizes, strategy, weights)
        self.total = sum(self.counts)
        self.steps = -(-self.total // batch_size)

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the rows of a step, and whether each row is valid."""
        epoch, position = divmod(step, self.steps)
        positions = np.arange(position * self.batch_size, (position + 1) * self.batch_size)
        valid = positions < self.total
        positions = permute(positions % self.total, self.total, derive_key("mix", self.seed, epoch))
        borders = np.cumsum([0, *self.counts])
        dataset = np.searchsorted(borders, positions, side="right") - 1
        result = np.empty(self.batch_size, np.int64)
        for number in np.unique(dataset).tolist():
            part_rows = dataset == number
            draws = epoch * self.counts[number] + positions[part_rows] - borders[number]
            rounds, ranks = np.divmod(draws, self.sizes[number])
            rows = np.empty(len(draws), np.int64)
            for round_number in np.unique(rounds).tolist():
                is_round = rounds == round_number
                key = derive_key("part", self.seed, number, round_number)
                rows[is_round] = permute(ranks[is_round], self.sizes[number], key)
            result[part_rows] = rows + self.mixed.offsets[number]
        return result, valid
