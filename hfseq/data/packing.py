"""Rows of tokens out of a TokenStore: documents packed end to end, or one document per row."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hfseq.data.store import TokenStore


class Rows(Protocol):
    """Random access to rows; ``fetch`` gives int32 arrays of shape (len(indices), width).

    "input_ids" is filled up with the pad id; "segment_ids" counts the documents of a row from 1 and
    is 0 on padding; "position_ids" begins at 0 in every document; "continues" (only where the store
    has it) is 1 on a token that continues a word. "next_ids", (len(indices),), is the token that
    follows the row in the same document, or -1.
    """

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> Any:
        """Columns that a batch of these rows takes (of either side, where rows are of pairs)."""
        ...

    def fetch(self, indices: np.ndarray, width: Any = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide."""
        ...


class PackedRows:
    """Row i is ``tokens[i * length:(i + 1) * length]``; the last one is padded, nothing is dropped.

    A document that began in an earlier row starts at position 0 again: rows are independent. With
    ``cross_documents`` a row is one sequence, whatever documents are in it. Only the first
    ``tokens`` of the store make rows where it is given; what follows is there to be predicted.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        cross_documents: bool = False,
        tokens: int | None = None,
    ):
        self.store, self.length, self.cross_documents = store, length, cross_documents
        self.total = store.total_tokens if tokens is None else min(tokens, store.total_tokens)

    def __len__(self) -> int:
        return -(-self.total // self.length)

    def width(self, indices: np.ndarray) -> int:
        """Columns of a batch: always the length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out; see ``Rows``."""
        starts = np.asarray(indices, np.int64) * self.length
        lengths = np.minimum(self.length, self.total - starts)
        rows = _gather(self.store, starts, lengths, self.length)
        begins = self._document_starts(starts, lengths)
        real = rows.pop("real")
        columns = np.arange(self.length, dtype=np.int32)
        last_start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        segments = 1 + np.cumsum(begins, axis=1, dtype=np.int32)
        return rows | {
            "segment_ids": np.where(real, segments, 0).astype(np.int32),
            "position_ids": np.where(real, columns - last_start, 0).astype(np.int32),
            "next_ids": self._next_ids(starts + lengths),
        }

    def previous_ids(self, indices: np.ndarray) -> np.ndarray:
        """The tokens before these rows, -1 before the first; documents run on from row to row."""
        places = np.asarray(indices, np.int64) * self.length - 1
        return np.where(places < 0, -1, self.store.tokens[np.maximum(places, 0)]).astype(np.int32)

    def _next_ids(self, places: np.ndarray) -> np.ndarray:
        """The tokens at ``places``, -1 where a document begins or the text has ended."""
        store = self.store
        begins = store.offsets[np.searchsorted(store.offsets, places)] == places
        known = places < store.total_tokens
        if not self.cross_documents:
            known &= ~begins
        tokens = store.tokens[np.minimum(places, store.total_tokens - 1)]
        return np.where(known, tokens, -1).astype(np.int32)

    def _document_starts(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Where a document begins within a row, its first column apart; bool (rows, length)."""
        offsets = self.store.offsets[:0] if self.cross_documents else self.store.offsets
        first = np.searchsorted(offsets, starts, side="right")
        counts = np.searchsorted(offsets, starts + lengths, side="left") - first
        rows = np.repeat(np.arange(len(starts)), counts)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), self.length), bool)
        begins[rows, offsets[first[rows] + rank] - starts[rows]] = True
        return begins


class LineRows:
    """Row i is document i, truncated to ``max_length``.

    A batch is as wide as its longest row, rounded up to a quarter of ``max_length`` (there are
    four, so the training step compiles four times at most); with ``pad_to_max_length`` always
    ``max_length``. Processes that fetch parts of one batch pass ``width(all indices)``.
    """

    def __init__(self, store: TokenStore, max_length: int, pad_to_max_length: bool = False):
        self.store, self.max_length, self.pad_to_max_length = store, max_length, pad_to_max_length
        quarters = (-(-max_length * k // 4) for k in (1, 2, 3))
        self.widths = sorted(
            {min(-(-quarter // 8) * 8, max_length) for quarter in quarters} | {max_length}
        )

    def __len__(self) -> int:
        return len(self.store)

    def width(self, indices: np.ndarray) -> int:
        """The narrowest of the four widths that holds these rows."""
        if self.pad_to_max_length:
            return self.max_length
        return next(
            width for width in self.widths if width >= self._lengths(indices).max(initial=1)
        )

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        offsets = self.store.offsets
        return np.minimum(offsets[np.asarray(indices) + 1] - offsets[indices], self.max_length)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide; see ``Rows``."""
        width = width or self.width(indices)
        rows = _gather(self.store, self.store.offsets[indices], self._lengths(indices), width)
        real = rows.pop("real")
        return rows | {
            "segment_ids": real.astype(np.int32),
            "position_ids": np.where(real, np.arange(width, dtype=np.int32), 0).astype(np.int32),
            "next_ids": np.full(len(real), -1, np.int32),
        }


def _gather(
    store: TokenStore, starts: np.ndarray, lengths: np.ndarray, width: int
) -> dict[str, np.ndarray]:
    """Copy ``tokens[start:start + length]`` into rows; "real" is True where a row holds a token."""
    rows = {"input_ids": np.full((len(starts), width), store.pad_token_id, np.int32)}
    sources = {"input_ids": store.tokens}
    if store.continues is not None:
        rows["continues"] = np.zeros((len(starts), width), np.int32)
        sources["continues"] = store.continues
    for name, source in sources.items():
        for row, start, length in zip(rows[name], starts.tolist(), lengths.tolist(), strict=True):
            row[:length] = source[start : start + length]
    return rows | {"real": np.arange(width) < lengths[:, None]}
