"""Batches on the devices, prepared in advance by a thread so that steps do not wait for data."""

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
from hfseq.nn import sharding
from hfseq.training.state import Batch

if TYPE_CHECKING:
    from hfseq.objectives.base import Objective

T = TypeVar("T")


def prefetch(
    make_batch: Callable[[int], T], start: int, stop: int, depth: int = 2
) -> Generator[tuple[int, T]]:
    """Yields `(step, make_batch(step))` for the steps in `[start, stop)`, prepared in advance.

    One thread makes all batches in order. An exception in `make_batch` is raised when its batch is
    due. Closing the iterator stops the thread before `close` returns.

    Args:
        make_batch: Returns the batch of a step.
        start: The first step.
        stop: The step after the last one.
        depth: Number of batches to prepare ahead, in addition to the one in preparation.
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


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, micro_batches: int
) -> dict[str, jax.Array]:
    """Splits a global batch into micro-batches and shards them over the mesh.

    Each process has the whole batch on the host and transfers only the parts for its devices.
    Arrays of the same shape as `input_ids` are also split over the `sequence` axis, if it divides
    their length.
    Other arrays (targets per group, decoder inputs, images) are not.

    Args:
        batch: Arrays with the rows on the first axis.
        mesh: The device mesh.
        micro_batches: The number of micro-batches.

    Returns:
        Arrays with the micro-batches on the first axis and the rows on the second.
    """
    rows = batch["input_ids"].shape if "input_ids" in batch else None

    def put(array: np.ndarray) -> jax.Array:
        cut = array.reshape(micro_batches, array.shape[0] // micro_batches, *array.shape[1:])
        split = array.shape == rows and not array.shape[1] % mesh.shape["sequence"]
        target_sharding = sharding.batch_sharding(mesh, cut.ndim, split_length=split)
        return jax.make_array_from_callback(cut.shape, target_sharding, lambda index: cut[index])

    return {name: put(array) for name, array in batch.items()}


class LoadedBatch(NamedTuple):
    """The batch of a step on the devices.

    Attributes:
        step: The step.
        batch: The arrays.
        tokens: The number of tokens without padding.
        position: The position in streamed data after this batch.
    """

    step: int
    batch: Batch
    tokens: int
    position: dict | None


class Loader:
    """Makes the batches of a run in a thread.

    Random masks depend on seed, step and the row in the global batch, but not on the number of
    processes, devices or micro-batches.

    Args:
        source: The rows.
        objective: The objective, which collates rows and draws masks.
        mesh: The device mesh.
        micro_batches: The number of micro-batches.
        seed: The random seed.
        position: The position from which to continue streamed data.
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
        self.source, self.objective, self.mesh = source, objective, mesh
        self.micro_batches, self.seed = micro_batches, seed
        if isinstance(source, StreamingBatches):
            if position is not None:
                source.restore(position)
            self._stream = iter(source)

    def batches(self, start: int, stop: int) -> Generator[LoadedBatch]:
        """Yields the batches of the steps in `[start, stop)`."""
        with contextlib.closing(prefetch(self.make_batch, start, stop)) as items:
            for _, item in items:
                yield item

    def make_batch(self, step: int) -> LoadedBatch:
        """Returns the batch of a step. A stream returns its next batch instead."""
        position = None
        if isinstance(self.source, StreamingBatches):
            rows = next(self._stream)
            position = self.source.state()
        else:
            rows = self.source[step]
        row_indices = np.arange(len(rows["valid"]), dtype=np.int32)
        random = RowRandom(self.seed, step, row_indices)
        groups = sharding.data_shards(self.mesh) * self.micro_batches
        batch = self.objective.collate(rows, random, groups) | {"row": row_indices}
        device_batch = place_batch(batch, self.mesh, self.micro_batches)
        return LoadedBatch(step, device_batch, self.objective.count_tokens(rows), position)
