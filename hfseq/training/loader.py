"""Batches on the device, made ahead of time: the step never waits for data."""

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
    """Yield ``(step, make_batch(step))`` for steps in [start, stop), made up to ``depth`` ahead.

    One thread makes them, in order, and one more while it waits. What it raises is raised here,
    with its traceback, once the batches before it are used up; closing the iterator ends the thread
    before ``close`` returns.
    """
    pool = ThreadPoolExecutor(1, "hfseq-prefetch")
    made: deque[Future[T]] = deque()
    try:
        for step in range(start, stop):
            while len(made) < min(depth + 2, stop - step):
                made.append(pool.submit(make_batch, step + len(made)))
            yield step, made.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, micro: int) -> dict[str, jax.Array]:
    """Cut a global batch into ``micro`` micro-batches and lay it over the mesh.

    Each process holds the whole host batch and puts only what its devices need on them. An array of
    the rows' own shape is split over ``sequence`` too, where that divides it; others (targets per
    group, a decoder's, pictures) are not.
    """
    rows = batch["input_ids"].shape if "input_ids" in batch else None

    def put(array: np.ndarray) -> jax.Array:
        cut = array.reshape(micro, array.shape[0] // micro, *array.shape[1:])
        split = array.shape == rows and not array.shape[1] % mesh.shape["sequence"]
        place = sharding.batch_sharding(mesh, cut.ndim, split_length=split)
        return jax.make_array_from_callback(cut.shape, place, lambda index: cut[index])

    return {name: put(array) for name, array in batch.items()}


class LoadedBatch(NamedTuple):
    """A step's batch, with the real tokens in it and the data position after it."""

    step: int
    batch: Batch
    tokens: int
    position: dict | None


class Loader:
    """Turns rows into placed batches in a thread.

    Random masks belong to (seed, step, row of the global batch), so they do not depend on
    processes, devices or micro-batches. ``position`` is where a stream goes on.
    """

    def __init__(
        self,
        source: Batches | StreamingBatches,
        objective: Objective,
        mesh: Mesh,
        micro: int,
        seed: int,
        position: dict | None = None,
    ):
        self.source, self.objective, self.mesh = source, objective, mesh
        self.micro_batches, self.seed = micro, seed
        if isinstance(source, StreamingBatches):
            if position is not None:
                source.restore(position)
            self._stream = iter(source)

    def batches(self, start: int, stop: int) -> Generator[LoadedBatch]:
        """Yield the batch of every step in [start, stop)."""
        with contextlib.closing(prefetch(self.make_batch, start, stop)) as items:
            for _, item in items:
                yield item

    def make_batch(self, step: int) -> LoadedBatch:
        """Return the batch of a step; a stream's is the next one."""
        position = None
        if isinstance(self.source, StreamingBatches):
            rows = next(self._stream)
            position = self.source.state()
        else:
            rows = self.source[step]
        numbers = np.arange(len(rows["valid"]), dtype=np.int32)
        random = RowRandom(self.seed, step, numbers)
        groups = sharding.data_shards(self.mesh) * self.micro_batches
        batch = self.objective.collate(rows, random, groups) | {"row": numbers}
        placed = place_batch(batch, self.mesh, self.micro_batches)
        return LoadedBatch(step, placed, self.objective.tokens(rows), position)
