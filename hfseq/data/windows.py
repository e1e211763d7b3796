"""Batches of windows: rows that are read a part at a time, and streams that read on for ever.

As in :mod:`hfseq.data.batches` everything is a pure function of (seed, step), so a run that was
stopped between two windows of a row goes on with the very next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hfseq.data.batches import Batches
from hfseq.data.packing import Rows
from hfseq.errors import UsageError


class WindowBatches(Batches):
    """Step *s* is window ``s % windows`` of the rows of sequence step ``s // windows``.

    Every epoch visits each row once, in an order of its own, and all windows of a row in turn; the
    same row has the same place in the batch until its last window. Beside the columns of the
    window, a batch has "previous_ids", the token before it (-1 at the beginning of a row),
    "next_ids", the one after it, and "fresh", True where a row begins.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, windows: int):
        super().__init__(rows, batch_size, seed)
        self.windows = windows

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.steps * self.windows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row numbers of a step and which of them count, as its first window did."""
        return super().indices(step // self.windows)

    def fetch(self, step: int, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return ``part`` of the batch: one window of the rows' arrays, and what is around it."""
        rows, window = super().fetch(step, part), step % self.windows
        ids = rows["input_ids"]
        width = ids.shape[1] // self.windows
        start, stop = window * width, (window + 1) * width
        real = rows["segment_ids"] > 0
        begins = np.full(len(ids), window == 0)
        following = rows["next_ids"]
        if stop < ids.shape[1]:
            following = np.where(real[:, stop], ids[:, stop], following)
            # A row that ends with this window is followed by what follows the row.
        return {
            name: array[:, start:stop] if array.shape == ids.shape else array
            for name, array in rows.items()
        } | {
            "previous_ids": np.where(begins, -1, ids[:, start - 1]).astype(np.int32),
            "next_ids": following.astype(np.int32),
            "fresh": begins,
        }


class StreamBatches(Batches):
    """Each place of the batch reads on through the text, a row of ``rows`` a step, for ever.

    With *b* places the text is cut into *b* parts of equal length; place *i* begins with part *i*
    and goes on with the part after it, so an epoch reads every row once and nobody skips. At the
    end of the text a place begins anew: "fresh" is True there, and "previous_ids" is -1.

    Raises:
        UsageError: ``rows`` are not cut out of one text.
    """

    def __init__(self, rows: Any, batch_size: int, seed: int):
        super().__init__(rows, batch_size, seed, shuffle=False)
        if not hasattr(rows, "previous_ids"):
            raise UsageError(
                "--state_reset never needs a text to read on in; these rows have nothing to do "
                "with each other (images): drop the flag"
            )

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row that each place reads, and whether there is one (the last part ends)."""
        places = np.arange(self.batch_size, dtype=np.int64) * self.steps
        order = (places + step) % (self.batch_size * self.steps)
        valid = order < len(self.rows)
        return np.where(valid, order, 0), valid

    def fetch(self, step: int, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return ``part`` of the batch, with "previous_ids" and "fresh"."""
        indices, valid = self.indices(step)
        rows = super().fetch(step, part)
        return rows | {
            "previous_ids": self.rows.previous_ids(indices[part]),  # type: ignore[attr-defined]
            "fresh": (indices == 0)[part] & valid[part],
        }
