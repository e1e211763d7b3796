"""Rows of tokens, batches of rows, and random numbers for the rows of a batch.

A row is one entry of a batch. It contains one document, or several packed documents.

Batches and random numbers are pure functions of the seed and the step number: `Batches[step]` is
the batch of a step, and the random numbers of a row depend on (seed, step, row) only. A resumed run
therefore needs only the step number, and no saved state of the data loader.
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
    - "continues": 1 for tokens that continue the word of the previous token, 0 for all others. Only
      present if the token store has this information.

    It also returns "next_ids", `(len(indices),)`: the token that follows the row in the same
    document, or -1 if the document ends with the row.
    """

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> Any:
        """Returns the width of a batch of these rows, in tokens."""
        ...

    def fetch(self, indices: np.ndarray, width: Any = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows, padded to `width` tokens."""
        ...


class PackedRows:
    """Packed documents: row i is `tokens[i * length:(i + 1) * length]`.

    The last row is padded, so no token is dropped. If a row begins in the middle of a document, its
    position IDs nevertheless start at 0, so that rows are independent of each other.

    Args:
        store: The documents.
        length: Row length in tokens.
        cross_documents: Whether a row is one sequence regardless of document boundaries.
        tokens: Number of tokens to divide into rows, from the start of the store. Default: all. The
            token after them is only used as "next_ids" of the last row.
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
        """Returns the index of each row's first token in the store, and each row's length."""
        starts = np.asarray(indices, np.int64) * self.length
        return starts, np.minimum(self.length, self.total - starts)

    @property
    def max_runs(self) -> int:
        """An upper bound on the number of segments per row, where padding counts as a segment."""
        if self.cross_documents:
            return 2
        starts, lengths = self.spans(np.arange(len(self)))
        first = np.searchsorted(self.store.offsets, starts, side="right")
        last = np.searchsorted(self.store.offsets, starts + lengths, side="left")
        return 2 + int((last - first).max(initial=0))  # the first segment, and padding

    def width(self, indices: np.ndarray) -> int:
        """Returns the width of a batch, which is always the row length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows; see `Rows`."""
        store, (starts, lengths) = self.store, self.spans(indices)
        rows, real = store.gather(starts, lengths, self.length)

        # Document starts within the rows. A start in the first column of a row is not included.
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
        """Returns the token before each row, or -1 for the first row.

        The token may belong to a different document than the first token of the row.
        """
        previous = np.asarray(indices, np.int64) * self.length - 1
        return np.where(previous < 0, -1, self.store.tokens[np.maximum(previous, 0)]).astype(
            np.int32
        )


class LineRows:
    """One document per row, truncated to `max_length` tokens.

    The width of a batch is the length of its longest row, rounded up to one, two, three or four
    quarters of `max_length`. The training step is therefore compiled for at most four widths. With
    `pad_to_max_length`, all batches are `max_length` tokens wide. A process that fetches only a
    part of a batch must pass the width of the complete batch to `fetch`.

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
        """Returns the arrays of these rows, padded to `width` tokens; see `Rows`."""
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

    The width of a batch is chosen as in `LineRows`. If all rows are shorter than `max_length`, the
    length of the longest row (rounded up to a multiple of 8) takes the place of `max_length`.

    Args:
        ids: Token ids of each row, truncated to `max_length`.
        pad: The pad token id.
        max_length: Maximum row length.
        tokens: Additional arrays with one value per token. Maps the name of each array to the
            values of all rows and the value for padding.
        rows: Additional arrays with one entry per row, by name.
        pad_to_max_length: Whether all batches are `max_length` tokens wide.
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
        """Returns the arrays of these rows, padded to `width` tokens."""
        rows = super().fetch(indices, width)
        arrays = {name: rows[name] for name in ("input_ids", "segment_ids")}
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        for name, store in self.fields.items():
            gathered, _ = store.gather(starts, lengths, rows["input_ids"].shape[1])
            arrays[name] = gathered["input_ids"]
        return arrays | {name: values[indices] for name, values in self.rows.items()}


class GroupedRows(FieldRows):
    """Rows of examples with several texts each. Token IDs have the shape `(rows, texts, width)`.

    Args:
        texts: For each position in an example, the token IDs of the text of each example.
        pad: ID of the padding token.
        max_length: Maximum number of tokens per text.
        pad_to_max_length: Whether all rows are padded to `max_length`.
        tokens: Additional arrays with one value per token, by name, like `texts`. They are padded
            with 0.
        arrays: Additional arrays with one entry per example, by name.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[Sequence[int]]],
        pad: int,
        max_length: int,
        pad_to_max_length: bool,
        tokens: Mapping[str, Sequence[Sequence[Sequence[int]]]] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ):
        self.size = len(texts)

        def interleave(columns: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[int]]:
            return [values for example in zip(*columns, strict=True) for values in example]

        token_arrays = {name: (interleave(columns), 0) for name, columns in (tokens or {}).items()}
        super().__init__(interleave(texts), pad, max_length, token_arrays, {}, pad_to_max_length)
        self.arrays = dict(arrays or {})

    def __len__(self) -> int:
        return len(self.store) // self.size

    def _documents(self, indices: np.ndarray) -> np.ndarray:
        return (np.asarray(indices)[:, None] * self.size + np.arange(self.size)).ravel()

    def width(self, indices: np.ndarray) -> int:
        """Returns the smallest width in which all texts of these rows fit."""
        return super().width(self._documents(indices))

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns these rows, padded to `width` columns."""
        rows = super().fetch(self._documents(indices), width or self.width(indices))
        grouped = {name: ids.reshape(len(indices), self.size, -1) for name, ids in rows.items()}
        return grouped | {name: values[indices] for name, values in self.arrays.items()}


class IndexRows:
    """Rows that contain the index of an image or audio file instead of its content.

    The objective reads the files when it collates a batch.

    Args:
        examples: The examples.
        length: Number of positions that an example occupies in the model.
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
        """Returns the width of a batch, which is always `length`."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows.

        "numbers" contains the indices of the examples, and "split" the index of the split in
        `SPLITS`.
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
    """The batch of each step, as a pure function of (seed, step).

    `batches[step]` contains the arrays of the batch's rows and "valid", a bool array with one entry
    per row. Step numbers continue from epoch to epoch. Every epoch visits each row once, in a
    different order if `shuffle` is true. If too few rows remain for the last batch of an epoch, it
    is filled up with other rows, for which "valid" is false. With `drop_last`, such a batch is
    dropped instead.

    Raises:
        DataError: There are not enough rows for a single batch.
    """

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ):
        self.rows, self.batch_size, self.seed, self.shuffle = rows, batch_size, seed, shuffle
        # Whether a batch also contains each prompt with the answer of another row.
        self.mismatched = getattr(rows, "mismatched", False)
        self.steps = len(rows) // batch_size if drop_last else -(-len(rows) // batch_size)
        if self.mismatched and shuffle and batch_size < 2:
            raise UsageError(
                "--global_batch_size 1: the KL divergence is estimated with the answers of other "
                "rows of the same step. Use at least 2 rows per step"
            )
        if not self.steps:
            raise DataError(
                f"{len(rows)} rows do not fill a batch of {batch_size}: use a smaller batch size"
            )

    def __len__(self) -> int:
        """Returns the number of steps per epoch."""
        return self.steps

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the rows of a step.

        Args:
            step: Step number, from 0.

        Returns:
            Row indices, int64 `(batch_size,)`, and whether each row is valid, bool `(batch_size,)`.
        """
        epoch, position = divmod(step, self.steps)
        order = np.arange(position * self.batch_size, (position + 1) * self.batch_size)
        valid = order < len(self.rows)
        order %= len(self.rows)
        if self.shuffle:
            order = permute(order, len(self.rows), derive_key("epoch", self.seed, epoch))
        return order, valid

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.fetch(step, np.arange(self.batch_size))

    def fetch(self, step: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows of a step's batch.

        Args:
            step: Step number, from 0.
            part: The positions within the batch whose rows are returned. Each process passes the
                positions that belong to its devices.

        Returns:
            The arrays of `Rows.fetch`, with the width of the complete batch, and "valid".
        """
        indices, valid = self.indices(step)
        width = self.rows.width(indices)
        arrays = self.rows.fetch(indices[part], width) | {"valid": valid[part]}
        if self.mismatched:
            # Every process knows the indices of all rows of the step.
            others = np.roll(indices, -1) if self.shuffle else (indices + 1) % len(self.rows)
            rows: Any = self.rows
            arrays |= rows.fetch_mismatched(indices[part], others[part], width)
        return arrays


class WindowBatches(Batches):
    """Batches for truncated back-propagation, which trains long rows window by window.

    Each row is divided into `windows` windows of equal length. Step s trains window `s % windows`
    of the rows that `Batches` returns for step `s // windows`. A row therefore keeps its position
    in the batch from its first to its last window. In addition to the arrays of the window, a batch
    contains:

    - "previous_ids": The token before the window, or -1 for the first window of a row.
    - "next_ids": The token after the window, or -1 if there is none.
    - "fresh": True for the first window of a row.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, windows: int):
        super().__init__(rows, batch_size, seed)
        self.windows = windows

    def __len__(self) -> int:
        """Returns the number of steps per epoch."""
        return self.steps * self.windows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row indices of a step, and whether each row is valid.

        They are the same for all windows of the rows.
        """
        return super().indices(step // self.windows)

    def fetch(self, step: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows of a window; see `Batches.fetch`."""
        rows, window = super().fetch(step, part), step % self.windows
        ids = rows["input_ids"]
        width = ids.shape[1] // self.windows
        start, stop = window * width, (window + 1) * width
        real = rows["segment_ids"] > 0
        begins = np.full(len(ids), window == 0)
        following = rows["next_ids"]
        if stop < ids.shape[1]:
            following = np.where(real[:, stop], ids[:, stop], following)
            # Where the row ends with this window, `following` remains the token after the row.
        return {
            name: array[:, start:stop] if array.shape == ids.shape else array
            for name, array in rows.items()
        } | {
            "previous_ids": np.where(begins, -1, ids[:, start - 1]).astype(np.int32),
            "next_ids": following.astype(np.int32),
            "fresh": begins,
        }


class ContinuousBatches(Batches):
    """Batches in which each position of the batch reads through the text, one row per step.

    They are used with `--state_reset never`, where the model's state is carried from row to row.

    The text is divided into `batch_size` parts of equal length. Position i of the batch starts with
    part i and continues with the next part, so that an epoch reads every row once. A position that
    reaches the end of the text continues with the first row of the text. For the first row,
    "fresh" is true and "previous_ids" is -1.

    Raises:
        UsageError: The rows are not `PackedRows`, and therefore not continuous text.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        super().__init__(rows, batch_size, seed, shuffle=False)
        if not isinstance(rows, PackedRows):
            raise UsageError(
                "`--state_reset never` requires continuous text, but these rows are independent "
                "(e.g. images): drop the flag"
            )
        self.text = rows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row index of each position, and whether the row is valid.

        The last part of the text can be shorter than the other parts. After its last row, the
        position of the batch that reads this part is invalid.
        """
        begins = np.arange(self.batch_size, dtype=np.int64) * self.steps
        order = (begins + step) % (self.batch_size * self.steps)
        valid = order < len(self.rows)
        return np.where(valid, order, 0), valid

    def fetch(self, step: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows of a step, and the token before each row; see `Batches.fetch`."""
        indices, valid = (array[part] for array in self.indices(step))
        return super().fetch(step, part) | {
            "previous_ids": self.text.previous_ids(indices),
            "fresh": (indices == 0) & valid,
        }


class RowRandom:
    """Random numbers for the rows of a batch, as a function of (seed, step, row).

    The numbers of a row do not depend on the other rows. Each method call draws new numbers, which
    depend on the number of earlier calls. They do not depend on the requested length: a longer draw
    starts with the same numbers as a shorter one. The generator is counter-based, with one
    SplitMix64 stream per row and call.

    Args:
        seed: The seed.
        step: The training step, or 0 in evaluation.
        rows: Positions of the rows in the global batch. In evaluation, their indices in the split.
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
        """Returns uniform random numbers in [0, 1), float32 `(rows, length)`."""
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
        """Returns a NumPy generator per row, for rows that need different numbers of draws."""
        self._draws += 1
        keys = (derive_key(self._base, self._draws, row) for row in self.rows.tolist())
        return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def derive_key(*parts: int | str) -> int:
    """Returns a 64-bit key for random numbers that depends on all of `parts`."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


FEISTEL_ROUNDS = 8
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Maps indices through a pseudorandom permutation of [0, n).

    A Feistel network permutes the integers below the next power of two. It is applied to each index
    repeatedly, until the value is below n (Black and Rogaway, 2002). The memory use is proportional
    to the number of `indices`, not to n.

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
        # If `bits` is odd, the halves differ in size. Each round swaps them, so an even number of
        # rounds brings them back to their places.
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
        pad_token_id: The decoder input in place of labels that the loss ignores.
        decoder_start_token_id: The first decoder input.

    Returns:
        Decoder inputs with the shape and dtype of `labels`.
    """
    start = np.full_like(labels[:, :1], decoder_start_token_id)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORE_INDEX, np.asarray(pad_token_id, shifted.dtype), shifted)
