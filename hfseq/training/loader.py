"""Prepares batches in a background thread and places them on the devices.

The thread works ahead of the training step, so that the step does not wait for data.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from hfseq.data.batches import Batches, RowRandom
from hfseq.data.streaming import StreamingBatches
from hfseq.errors import UsageError
from hfseq.nn import sharding
from hfseq.objectives.base import Arrays
from hfseq.training import processes
from hfseq.training.state import Batch

if TYPE_CHECKING:
    from hfseq.objectives.base import Objective

T = TypeVar("T")


def prefetch(
    make_batch: Callable[[int], T], start: int, stop: int, depth: int = 2
) -> Generator[tuple[int, T]]:
    """Yields `(step, make_batch(step))` for the steps in `[start, stop)`.

    A thread makes the batches in order and ahead of time. If `make_batch` raises an exception, the
    exception is raised again when the iteration reaches this batch. The `close` method of the
    iterator waits until the thread has stopped.

    Args:
        make_batch: Returns the batch of a step.
        start: The first step.
        stop: The step after the last one.
        depth: Maximum number of finished batches that wait for the caller, in addition to the batch
            that the thread is making.
    """
    pool = ThreadPoolExecutor(1, "hfseq-prefetch")
    futures: deque[Future[T]] = deque()
    try:
        for step in range(start, stop):
            while len(futures) < min(depth + 2, stop - step):
                futures.append(pool.submit(make_batch, step + len(futures)))
            yield step, futures.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class LocalRows:
    """The rows of a batch that the devices of this process hold.

    The rows of each micro-batch are split into parts of equal size. The number of parts is the size
    of the `data` mesh axis times the size of the `fsdp` mesh axis. The devices of a process hold
    one or more parts, and hold the same parts of every micro-batch.

    Args:
        mesh: The device mesh.
        rows: Number of rows of the batch, over all processes.
        micro_batches: The number of micro-batches.

    Attributes:
        indices: Positions in the batch of the rows of this process, ascending, int32
            `(local_rows,)`.
        groups: Number of parts that this process holds, summed over all micro-batches.
    """

    def __init__(self, mesh: Mesh, rows: int, micro_batches: int):
        self.mesh, self.micro_batches = mesh, micro_batches
        self.num_parts = sharding.data_shards(mesh)
        index_map = sharding.batch_sharding(mesh, 2).addressable_devices_indices_map(
            (micro_batches, self.num_parts)
        )
        own = sorted({index[1].start or 0 for index in index_map.values() if index is not None})
        self._number = {part: number for number, part in enumerate(own)}
        self.groups = micro_batches * len(own)
        positions = np.arange(rows, dtype=np.int32).reshape(micro_batches, self.num_parts, -1)
        self.indices = positions[:, own].reshape(-1)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Makes the global arrays of a batch from the rows of this process.

        Arrays with the same shape as `input_ids` are also split along their length over the
        `sequence` mesh axis, if the length is a multiple of the size of this axis. Other arrays,
        such as decoder inputs and images, are only split along their rows.

        Args:
            batch: Arrays whose first axis has one entry per row of this process, or one entry per
                group of rows (see `groups`).

        Returns:
            Arrays with the micro-batches on the first axis and the rows of all processes on the
            second.
        """
        shape = batch["input_ids"].shape if "input_ids" in batch else None

        def put(array: np.ndarray) -> jax.Array:
            # Number of entries per part: the number of rows in a part, or 1 if entries are groups.
            size = array.shape[0] // self.groups
            local = array.reshape(self.micro_batches, -1, *array.shape[1:])
            split = array.shape == shape and not array.shape[1] % self.mesh.shape["sequence"]

            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                start = self._number[(index[1].start or 0) // size] * size
                return local[(index[0], slice(start, start + size), *index[2:])]

            return jax.make_array_from_callback(
                (self.micro_batches, self.num_parts * size, *array.shape[1:]),
                sharding.batch_sharding(self.mesh, local.ndim, split_length=split),
                shard,
            )

        return {name: put(array) for name, array in batch.items()}


class LoadedBatch(NamedTuple):
    """The batch of a step on the devices.

    Attributes:
        step: The number of the step, from 0.
        batch: The arrays.
        position: The position in streamed data after this batch, or `None` if the data is not
            streamed.
    """

    step: int
    batch: Batch
    position: dict | None


class Loader:
    """Makes the batches of a run in a background thread.

    Each process fetches, decodes and collates only the rows that its devices hold. The random mask
    of a row depends on the seed, the step and the position of the row in the batch. It does not
    depend on the number of processes, devices or micro-batches.

    Args:
        source: The batches of rows, before they are collated.
        objective: The objective, which collates rows and draws masks.
        mesh: The device mesh.
        micro_batches: The number of micro-batches.
        seed: The random seed.
        position: The position in streamed data to continue from. Default: the start.
    """

    def __init__(
        self,
        source: Batches | StreamingBatches,
        objective: Objective,
        mesh: Mesh,
        micro_batches: int,
        seed: int,
        position: dict | None = None,
    ):
        self.source, self.objective, self.seed = source, objective, seed
        self.local = LocalRows(mesh, source.batch_size, micro_batches)
        self._maximum = processes.SharedMaximum()
        if isinstance(source, StreamingBatches) and position is not None:
            source.restore(position)

    def batches(self, start: int, stop: int) -> Generator[LoadedBatch]:
        """Yields the batches of the steps in `[start, stop)`."""
        with (
            contextlib.closing(prefetch(self.make_batch, start, stop)) as items,
            # This is closed first, so that the thread no longer waits for other processes.
            contextlib.closing(self._maximum),
        ):
            for _, item in items:
                yield item

    def make_batch(self, step: int) -> LoadedBatch:
        """Returns the batch of a step. With streamed data, this must be the next step."""
        part, position = self.local.indices, None
        if isinstance(self.source, StreamingBatches):
            rows = self.source.next(part)
            position = self.source.state()
        else:
            rows = self.source.fetch(step, part)
        batch = self._collate(rows, RowRandom(self.seed, step, part))
        tokens = np.asarray(self.objective.count_tokens(rows), np.int32)
        if tokens.shape != part.shape:
            name = type(self.objective).__name__
            raise UsageError(
                f"{name}.count_tokens returned the shape {tokens.shape}: return one number for "
                f"each of the {len(part)} rows"
            )
        batch |= {"row": part, "tokens": tokens}
        return LoadedBatch(step, self.local.place(batch), position)

    def _collate(self, rows: Arrays, random: RowRandom) -> Arrays:
        """Collates the rows of this process.

        Arrays of variable width are padded to the largest width in any process.
        """
        batch = self.objective.collate(rows, random, self.local.groups)
        fill = {
            name: value for name, value in self.objective.variable_width.items() if name in batch
        }
        widths = self._maximum({name: batch[name].shape[1] for name in fill})
        for name, width in widths.items():
            padding = [(0, 0)] * batch[name].ndim
            padding[1] = (0, width - batch[name].shape[1])
            batch[name] = np.pad(batch[name], padding, constant_values=fill[name])
        return batch


class EvaluationLoader(Loader):
    """Makes the batches of an evaluation.

    The random mask of a row depends only on the seed and on the index of the row in the split.
    Every evaluation therefore draws the same masks.
    """

    source: Batches

    def make_batch(self, step: int) -> LoadedBatch:
        """Returns the batch of a step."""
        part = self.local.indices
        row_indices = self.source.indices(step)[0][part]
        batch = self._collate(self.source.fetch(step, part), RowRandom(self.seed, 0, row_indices))
        return LoadedBatch(step, self.local.place(batch), None)
