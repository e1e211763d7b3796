"""Batches on the device, made ahead of time: the step never waits for data."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hfseq.data.batches import RowRandom
from hfseq.data.prefetch import prefetch
from hfseq.data.streaming import StreamingBatches
from hfseq.training import setup, sharding


class Feed:
    """Turns rows into placed batches in a thread.

    Random masks belong to (seed, step, row of the global batch), so they do not depend on
    processes, devices or micro-batches.
    """

    def __init__(self, source: Any, objective: Any, mesh: Mesh, micro: int, seed: int):
        self.source, self.objective, self.mesh = source, objective, mesh
        self.micro, self.seed = micro, seed
        self._stream: Iterator[dict[str, np.ndarray]] | None = None

    def restore(self, position: Any) -> None:
        """Go to the data position of a checkpoint (streams only; else the step says it)."""
        if position is not None and isinstance(self.source, StreamingBatches):
            self.source.restore(position)

    def batches(self, start: int, stop: int) -> Generator[tuple[int, dict[str, Any], int, Any]]:
        """Yield (step, placed batch, tokens, data position after it) for every step."""
        if isinstance(self.source, StreamingBatches):
            self._stream = iter(self.source)
        for step, (batch, tokens, position) in prefetch(self._make, start, stop):
            yield step, batch, tokens, position

    def _make(self, step: int) -> tuple[dict[str, Any], int, Any]:
        position = None
        if self._stream is not None:
            rows = next(self._stream)
            position = self.source.state()
        else:
            rows = self.source.fetch(step)
        numbers = np.arange(len(rows["input_ids"]), dtype=np.int32)
        random = RowRandom(self.seed, step, numbers)
        groups = sharding.data_shards(self.mesh) * self.micro
        batch = self.objective.collate(rows, random, groups) | {"row": numbers}
        return (
            setup.place_batch(batch, self.mesh, self.micro),
            self.objective.tokens(rows),
            position,
        )
