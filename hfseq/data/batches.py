"""Rows of tokens, and batches and random numbers as pure functions of (seed, step).

Resuming requires no state: `Batches[step]` is the batch of a step, and the random numbers of a row
depend on (seed, step, row) only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from hashlib import blake2b
from itertools import chain
from typing import Any, Protocol

import numpy as np

from hfseq.data.arguments import SPLITS
from hfseq.data.store import TokenStore
from hfseq.errors import DataError, UsageError

#: Label that the loss ignores.
IGNORE_INDEX = -100


class Rows(Protocol):
    """Random access to rows of tokens.

    `fetch` returns int32 arrays `(len(indices), width)`:

    - "input_ids": Token ids, padded with the pad token.
    - "segment_ids": Number of the document within the row, from 1. 0 for padding.
    - "position_ids": Position within the document, from 0.
    - "continues": 1 for tokens that continue a word, if the store has this information.

    and "next_ids", `(len(indices),)`: the token that follows the row in the same document, or -1.
    """

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> Any:
        """Returns the number of columns of a batch of these rows."""
        ...

    def fetch(self, indices: np.ndarray, width: Any = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows, `width` columns wide."""
        ...


class PackedRows:
    """Packed documents: row i is `tokens[i * length:(i + 1) * length]`.

    The last row is padded and no token is dropped. A document that continues from an earlier row
    starts at position 0 again, so that rows are independent.

    Args:
        store: The documents.
        length: Row length in tokens.
        cross_documents: Whether a row is one sequence regardless of document boundaries.
        tokens: Number of tokens of the store to use in rows, by default all. Later tokens are used
            as targets only.
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

    def spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first token of these rows in the store, and their number of tokens."""
        starts = np.asarray(indices, np.int64) * self.length
        return starts, np.minimum(self.length, self.total - starts)

    @property
    def max_runs(self) -> int:
        """An upper bound of the number of segments in a row, including padding."""
        if self.cross_documents:
            return 2
        starts, lengths = self.spans(np.arange(len(self)))
        first = np.searchsorted(self.store.offsets, starts, side="right")
        last = np.searchsorted(self.store.offsets, starts + lengths, side="left")
        return 2 + int((last - first).max(initial=0))  # the first segment, and padding

    def width(self, indices: np.ndarray) -> int:
        """Returns the number of columns of a batch, which is always the row length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows; see `Rows`."""
        store, (starts, lengths) = self.store, self.spans(indices)
        rows, real = store.gather(starts, lengths, self.length)

        # Starts of documents within a row, except in its first column.
        offsets = store.offsets[:0] if self.cross_documents else store.offsets
        first = np.searchsorted(offsets, starts, side="right")
        counts = np.searchsorted(offsets, starts + lengths, side="left") - first
        row = np.repeat(np.arange(len(starts)), counts)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), self.length), bool)
        begins[row, offsets[first[row] + rank] - starts[row]] = True
        columns = np.arange(self.length, dtype=np.int32)
        last_start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        segments = 1 + np.cumsum(begins, axis=1, dtype=np.int32)

        stops = starts + lengths
        has_next = stops < store.total_tokens
        if not self.cross_documents:
            has_next &= store.offsets[np.searchsorted(store.offsets, stops)] != stops
        following = store.tokens[np.minimum(stops, store.total_tokens - 1)]
        return rows | {
            "segment_ids": np.where(real, segments, 0).astype(np.int32),
            "position_ids": np.where(real, columns - last_start, 0).astype(np.int32),
            "next_ids": np.where(has_next, following, -1).astype(np.int32),
        }

    def previous_ids(self, indices: np.ndarray) -> np.ndarray:
        """Returns the token before each row, across documents; -1 for the first row."""
        previous = np.asarray(indices, np.int64) * self.length - 1
        return np.where(previous < 0, -1, self.store.tokens[np.maximum(previous, 0)]).astype(
            np.int32
        )


class LineRows:
    """One document per row, truncated to `max_length` tokens.

    A batch is as wide as its longest row, rounded up to a quarter of `max_length`, so that the
    training step is compiled at most four times. With `pad_to_max_length` it is always `max_length`
    wide. Processes that fetch parts of a batch pass the width of the complete batch.

    Attributes:
        widths: The possible widths in ascending order.
    """

    def __init__(self, store: TokenStore, max_length: int, pad_to_max_length: bool = False):
        self.store, self.max_length = store, max_length
        quarters = () if pad_to_max_length else (1, 2, 3)
        self.widths = sorted(
            {min(-(-max_length * k // 32) * 8, max_length) for k in quarters} | {max_length}
        )

    max_runs = 2  # the row and its padding

    def __len__(self) -> int:
        return len(self.store)

    def width(self, indices: np.ndarray) -> int:
        """Returns the smallest of `widths` that fits these rows."""
        longest = self._lengths(indices).max(initial=1)
        return next(width for width in self.widths if width >= longest)

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        offsets = self.store.offsets
        return np.minimum(offsets[np.asarray(indices) + 1] - offsets[indices], self.max_length)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows, `width` columns wide; see `Rows`."""
        width = width or self.width(indices)
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        rows, real = self.store.gather(starts, lengths, width)
        return rows | {
            "segment_ids": real.astype(np.int32),
            "position_ids": np.where(real, np.arange(width), 0).astype(np.int32),
            "next_ids": np.full(len(real), -1, np.int32),
        }


class FieldRows(LineRows):
    """Rows of token ids with additional arrays per token and per row.

    The width of a batch is chosen as in `LineRows`, but does not exceed the longest row.

    Args:
        ids: Token ids of each row, truncated to `max_length`.
        pad: The pad token id.
        max_length: Maximum row length.
        tokens: Arrays with one value per token, and the value for padding, by name.
        rows: Arrays with one entry per row, by name.
        pad_to_max_length: Whether all batches are `max_length` wide.
    """

    def __init__(
        self,
        ids: Sequence[Sequence[int]],
        pad: int,
        max_length: int,
        tokens: Mapping[str, tuple[Sequence[Sequence[int]], int]],
        rows: Mapping[str, np.ndarray],
        pad_to_max_length: bool = False,
    ):
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = np.concatenate([[0], lengths.cumsum()])

        def store(values: Sequence[Sequence[int]], padding: int) -> TokenStore:
            flat = np.fromiter(chain.from_iterable(values), np.int32, int(offsets[-1]))
            return TokenStore(flat, offsets, padding)

        longest = min(-(-int(lengths.max()) // 8) * 8, max_length)
        width = max_length if pad_to_max_length else longest
        super().__init__(store(ids, pad), width, pad_to_max_length)
        self.fields = {name: store(values, padding) for name, (values, padding) in tokens.items()}
        self.rows = dict(rows)

    @property
    def total_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return self.store.total_tokens

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows, `width` columns wide."""
        rows = super().fetch(indices, width)
        arrays = {name: rows[name] for name in ("input_ids", "segment_ids")}
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        for name, store in self.fields.items():
            gathered, _ = store.gather(starts, lengths, rows["input_ids"].shape[1])
            arrays[name] = gathered["input_ids"]
        return arrays | {name: values[indices] for name, values in self.rows.items()}


class IndexRows:
    """Rows that contain only the index of an image or audio file, which is read for the batch.

    Args:
        examples: The examples.
        length: Number of model positions per example.
        split: Name of the split.
        arrays: Additional arrays with one entry per example, by name.
    """

    max_runs = 1

    def __init__(self, examples: Sized, length: int, split: str, arrays: Mapping[str, np.ndarray]):
        self.count, self.length, self.arrays = len(examples), length, arrays
        self.split = SPLITS.index(split)

    def __len__(self) -> int:
        return self.count

    def width(self, indices: np.ndarray) -> int:
        """Returns the number of columns of a batch, which is always `length`."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows.

        "numbers" are the indices of the examples and "split" is the index of the split.
        """
        indices = np.asarray(indices, np.int64)
        return {
            "numbers": indices,
            "split": np.full(len(indices), self.split, np.int32),
            **{name: values[indices] for name, values in self.arrays.items()},
        }


def pad_labels(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Returns labels padded with `IGNORE_INDEX`, int32 `(rows, width)`."""
    labels = np.full((len(rows), width), IGNORE_INDEX, np.int32)
    for row, row_labels in zip(labels, rows, strict=True):
        row[: len(row_labels)] = row_labels
    return labels


class Batches:
    """The rows of each step's batch, as a pure function of (seed, step).

    `batches[step]` contains the arrays of the rows and "valid". Step numbers continue from epoch to
    epoch. Every epoch visits each row once in a different order. Its last batch is filled with rows
    that are marked as invalid, or dropped with `drop_last`.

    Raises:
        DataError: The rows do not fill a single batch.
    """

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ):
        self.rows, self.batch_size, self.seed, self.shuffle = rows, batch_size, seed, shuffle
        self.steps = len(rows) // batch_size if drop_last else -(-len(rows) // batch_size)
        if not self.steps:
            raise DataError(
                f"{len(rows)} rows do not fill a batch of {batch_size}: use a smaller batch size"
            )

    def __len__(self) -> int:
        """Returns the number of steps per epoch."""
        return self.steps

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of a step.

        Args:
            step: Step number, from 0.

        Returns:
            Row indices, int64 `(batch_size,)`, and which of them are valid, bool `(batch_size,)`.
        """
        epoch, position = divmod(step, self.steps)
        order = np.arange(position * self.batch_size, (position + 1) * self.batch_size)
        valid = order < len(self.rows)
        order %= len(self.rows)
        if self.shuffle:
            order = permute(order, len(self.rows), derive_key("epoch", self.seed, epoch))
        return order, valid

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        indices, valid = self.indices(step)
        return self.rows.fetch(indices, self.rows.width(indices)) | {"valid": valid}


class WindowBatches(Batches):
    """Batches of consecutive windows of long rows.

    Step s is window `s % windows` of the rows of `Batches` step `s // windows`. A row keeps its
    position in the batch until its last window. In addition to the columns of the window, a batch
    has "previous_ids", the token before it (-1 at the start of a row), "next_ids", the token after
    it, and "fresh", true where a row starts.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, windows: int):
        super().__init__(rows, batch_size, seed)
        self.windows = windows

    def __len__(self) -> int:
        """Returns the number of steps per epoch."""
        return self.steps * self.windows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row indices of a step and their validity, the same for all windows."""
        return super().indices(step // self.windows)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows, window = super().__getitem__(step), step % self.windows
        ids = rows["input_ids"]
        width = ids.shape[1] // self.windows
        start, stop = window * width, (window + 1) * width
        real = rows["segment_ids"] > 0
        begins = np.full(len(ids), window == 0)
        following = rows["next_ids"]
        if stop < ids.shape[1]:
            following = np.where(real[:, stop], ids[:, stop], following)
            # For rows that end with this window, `following` stays the token after the row.
        return {
            name: array[:, start:stop] if array.shape == ids.shape else array
            for name, array in rows.items()
        } | {
            "previous_ids": np.where(begins, -1, ids[:, start - 1]).astype(np.int32),
            "next_ids": following.astype(np.int32),
            "fresh": begins,
        }


class ContinuousBatches(Batches):
    """Batches in which each position reads continuously through the text, one row per step.

    The text is divided into `batch_size` parts of equal length. Position i of the batch starts with
    part i and continues with the next part, so that an epoch reads every row once. After the end of
    the text a position starts again with its first row: there "fresh" is true and "previous_ids" is
    -1.

    Raises:
        UsageError: The rows are not continuous text.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        super().__init__(rows, batch_size, seed, shuffle=False)
        if not isinstance(rows, PackedRows):
            raise UsageError(
                "--state_reset never requires continuous text, but these rows are independent "
                "(e.g. images): drop the flag"
            )
        self.text = rows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each position, and its validity (the last part may be shorter)."""
        begins = np.arange(self.batch_size, dtype=np.int64) * self.steps
        order = (begins + step) % (self.batch_size * self.steps)
        valid = order < len(self.rows)
        return np.where(valid, order, 0), valid

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        indices, valid = self.indices(step)
        return super().__getitem__(step) | {
            "previous_ids": self.text.previous_ids(indices),
            "fresh": (indices == 0) & valid,
        }


class RowRandom:
    """Random numbers for the rows of a batch, as a function of (seed, step, row).

    The numbers of a row depend neither on the other rows nor on the length of the draw (a longer
    draw starts with the same numbers), but on the number of earlier draws. The generator is
    counter-based: one SplitMix64 stream per row and draw.

    Args:
        seed: The seed.
        step: The training step, 0 in evaluation.
        rows: Row indices within the global batch.
    """

    def __init__(self, seed: int, step: int, rows: np.ndarray):
        self.step, self.rows = step, np.asarray(rows, np.uint64)
        self._base, self._draws = derive_key("rows", seed, step), 0

    def _bits(self, length: int) -> np.ndarray:
        keys = splitmix64(
            (self.rows + np.uint64(1)) * np.uint64(GOLDEN_GAMMA)
            ^ np.uint64(derive_key(self._base, self._draws))
        )
        self._draws += 1
        steps = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
        return splitmix64(keys[:, None] + steps)

    def uniform(self, length: int) -> np.ndarray:
        """Returns uniform numbers in [0, 1), float32 `(rows, length)`."""
        bits = self._bits(length)
        bits >>= np.uint64(40)  # a float32 represents 24 bits exactly
        numbers = bits.astype(np.float32)
        numbers *= np.float32(2**-24)
        return numbers

    def integers(self, high: int, length: int) -> np.ndarray:
        """Returns uniform integers in [0, high), int32 `(rows, length)`; `high` <= 2**31."""
        bits = self._bits(length)
        bits >>= np.uint64(32)
        bits *= np.uint64(high)
        bits >>= np.uint64(32)
        return bits.astype(np.int32)

    def generators(self) -> list[np.random.Generator]:
        """Returns a NumPy generator per row, for draws of different lengths."""
        self._draws += 1
        keys = (derive_key(self._base, self._draws, row) for row in self.rows.tolist())
        return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def derive_key(*parts: int | str) -> int:
    """Returns a 64-bit key that depends on all parts."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


FEISTEL_ROUNDS = 8
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Maps indices through a pseudorandom permutation of [0, n).

    The permutation is a Feistel network over the next power of two, applied repeatedly until the
    value is below n (Black and Rogaway, 2002). Memory is proportional to `indices`, not to n.

    Args:
        indices: Indices in [0, n).
        n: Size of the permutation.
        key: Key that selects the permutation.

    Returns:
        The permuted indices, int64.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = bits - bits // 2
    masks = [np.uint64((1 << size) - 1) for size in (bits - low_bits, low_bits)]
    keys = [np.uint64(derive_key(key, i)) for i in range(FEISTEL_ROUNDS)]
    result = np.asarray(indices).astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        high, low = result[outside] >> np.uint64(low_bits), result[outside] & masks[1]
        # After an even number of rounds, halves of different size are in their places again.
        for i, round_key in enumerate(keys):
            noise = splitmix64((low + np.uint64(1)) * np.uint64(GOLDEN_GAMMA) ^ round_key)
            high, low = low, high ^ (noise & masks[i % 2])
        result[outside] = high << np.uint64(low_bits) | low
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer (Steele, Lea and Flood, 2014) in place to uint64 values."""
    scratch = x >> np.uint64(30)
    x ^= scratch
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=scratch)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=scratch)
    return x


def shift_right(labels: np.ndarray, pad_token_id: int, decoder_start_token_id: int) -> np.ndarray:
    """Returns decoder inputs: labels shifted right by one position, after the start token.

    Args:
        labels: Labels, `(batch, length)`.
        pad_token_id: Replaces ignored labels.
        decoder_start_token_id: The first decoder input.

    Returns:
        Decoder inputs with the shape and dtype of `labels`.
    """
    start = np.full_like(labels[:, :1], decoder_start_token_id)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORE_INDEX, np.asarray(pad_token_id, shifted.dtype), shifted)
