"""Rows of tokens, and batches and random numbers of them as pure functions of (seed, step).

Resuming needs no state: ``Batches[step]`` is the batch of a step, and what is drawn for a row of it
depends on (seed, step, row) alone.
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

#: The label of places that nothing is predicted at.
IGNORE_INDEX = -100


class Rows(Protocol):
    """Random access to rows; ``fetch`` gives int32 arrays of shape (len(indices), width).

    "input_ids" is filled up with the pad id; "segment_ids" counts the documents of a row from 1 and
    is 0 on padding; "position_ids" begins at 0 in every document; "continues" (only where the store
    has it) is 1 on a token that continues a word. "next_ids", (len(indices),), is the token that
    follows the row in the same document, or -1.
    """

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> Any:
        """Columns that a batch of these rows takes."""
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

    def spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where in the store these rows begin, and how many tokens each has."""
        starts = np.asarray(indices, np.int64) * self.length
        return starts, np.minimum(self.length, self.total - starts)

    @property
    def max_runs(self) -> int:
        """A bound of the runs of equal segments in any row, padding being one."""
        if self.cross_documents:
            return 2
        starts, lengths = self.spans(np.arange(len(self)))
        first = np.searchsorted(self.store.offsets, starts, side="right")
        last = np.searchsorted(self.store.offsets, starts + lengths, side="left")
        return 2 + int((last - first).max(initial=0))  # what the row begins with, and padding

    def width(self, indices: np.ndarray) -> int:
        """Columns of a batch: always the length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out; see ``Rows``."""
        store, (starts, lengths) = self.store, self.spans(indices)
        rows, real = store.gather(starts, lengths, self.length)

        # Where a document begins within a row, its first column apart.
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
        known = stops < store.total_tokens
        if not self.cross_documents:
            known &= store.offsets[np.searchsorted(store.offsets, stops)] != stops
        following = store.tokens[np.minimum(stops, store.total_tokens - 1)]
        return rows | {
            "segment_ids": np.where(real, segments, 0).astype(np.int32),
            "position_ids": np.where(real, columns - last_start, 0).astype(np.int32),
            "next_ids": np.where(known, following, -1).astype(np.int32),
        }

    def previous_ids(self, indices: np.ndarray) -> np.ndarray:
        """The tokens before these rows, -1 before the first; documents run on from row to row."""
        before = np.asarray(indices, np.int64) * self.length - 1
        return np.where(before < 0, -1, self.store.tokens[np.maximum(before, 0)]).astype(np.int32)


class LineRows:
    """Row i is document i, truncated to ``max_length``.

    A batch is as wide as its longest row, rounded up to a quarter of ``max_length`` (there are
    four, so the training step compiles four times at most); with ``pad_to_max_length`` always
    ``max_length``. Processes that fetch parts of one batch pass ``width(all indices)``.
    """

    def __init__(self, store: TokenStore, max_length: int, pad_to_max_length: bool = False):
        self.store, self.max_length = store, max_length
        quarters = () if pad_to_max_length else (1, 2, 3)
        #: Columns a batch may have, the most last.
        self.widths = sorted(
            {min(-(-max_length * k // 32) * 8, max_length) for k in quarters} | {max_length}
        )

    max_runs = 2  # the row and its padding

    def __len__(self) -> int:
        return len(self.store)

    def width(self, indices: np.ndarray) -> int:
        """The narrowest of the widths that holds these rows."""
        longest = self._lengths(indices).max(initial=1)
        return next(width for width in self.widths if width >= longest)

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        offsets = self.store.offsets
        return np.minimum(offsets[np.asarray(indices) + 1] - offsets[indices], self.max_length)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide; see ``Rows``."""
        width = width or self.width(indices)
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        rows, real = self.store.gather(starts, lengths, width)
        return rows | {
            "segment_ids": real.astype(np.int32),
            "position_ids": np.where(real, np.arange(width), 0).astype(np.int32),
            "next_ids": np.full(len(real), -1, np.int32),
        }


class FieldRows(LineRows):
    """Row i is ``ids[i]``, cut to ``max_length``, with other numbers for each of its tokens.

    ``tokens`` are those by name, with what stands at padding; ``rows`` are arrays with an entry for
    each row. Batches are as wide as those of examples (:class:`LineRows`), and as the longest row
    at most.
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
        """Tokens of all rows, without padding."""
        return self.store.total_tokens

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide."""
        rows = super().fetch(indices, width)
        kept = {name: rows[name] for name in ("input_ids", "segment_ids")}
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        for name, store in self.fields.items():
            gathered, _ = store.gather(starts, lengths, rows["input_ids"].shape[1])
            kept[name] = gathered["input_ids"]
        return kept | {name: values[indices] for name, values in self.rows.items()}


class IndexRows:
    """Row i is a picture or sound that is read when the batch is made: rows hold its number.

    ``arrays`` have an entry for each of the ``examples``, which rows hold, too; ``length`` is how
    many places one takes, as the model counts them.
    """

    max_runs = 1

    def __init__(self, examples: Sized, length: int, split: str, arrays: Mapping[str, np.ndarray]):
        self.count, self.length, self.arrays = len(examples), length, arrays
        self.split = SPLITS.index(split)

    def __len__(self) -> int:
        return self.count

    def width(self, indices: np.ndarray) -> int:
        """Columns of a batch: always the length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Return the numbers and arrays of these rows, and of which split they are."""
        indices = np.asarray(indices, np.int64)
        return {
            "numbers": indices,
            "split": np.full(len(indices), self.split, np.int32),
            **{name: values[indices] for name, values in self.arrays.items()},
        }


def pad_labels(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return rows of labels, int32 (rows, ``width``), with nothing to predict after their end."""
    labels = np.full((len(rows), width), IGNORE_INDEX, np.int32)
    for row, known in zip(labels, rows, strict=True):
        row[: len(known)] = known
    return labels


class Batches:
    """Which rows make up the global batch of a step, a pure function of (seed, step).

    ``batches[step]`` holds the rows' arrays and "valid"; steps go on from epoch to epoch. Every
    epoch visits each row once, in an order of its own. Its last batch is filled up with rows marked
    invalid, or left out with ``drop``.
    """

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ):
        self.rows, self.batch_size, self.seed, self.shuffle = rows, batch_size, seed, shuffle
        self.steps = len(rows) // batch_size if drop_last else -(-len(rows) // batch_size)
        if not self.steps:
            raise DataError(
                f"{len(rows)} rows do not make one batch of {batch_size}; give a smaller batch"
            )

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.steps

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return row numbers, int64 (batch_size,), and which of them count, bool (batch_size,)."""
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
            # A row that ends with this window is followed by what follows the row.
        return {
            name: array[:, start:stop] if array.shape == ids.shape else array
            for name, array in rows.items()
        } | {
            "previous_ids": np.where(begins, -1, ids[:, start - 1]).astype(np.int32),
            "next_ids": following.astype(np.int32),
            "fresh": begins,
        }


class ContinuousBatches(Batches):
    """Each place of the batch reads on through the text, a row of ``rows`` a step, for ever.

    With *b* places the text is cut into *b* parts of equal length; place *i* begins with part *i*
    and goes on with the part after it, so an epoch reads every row once and nobody skips. At the
    end of the text a place begins anew: "fresh" is True there, and "previous_ids" is -1.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        super().__init__(rows, batch_size, seed, shuffle=False)
        if not isinstance(rows, PackedRows):
            raise UsageError(
                "--state_reset never needs a text to read on in; these rows have nothing to do "
                "with each other (images): drop the flag"
            )
        self.text = rows

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row that each place reads, and whether there is one (the last part ends)."""
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
    """Random numbers for the rows of a batch, each depending on (seed, step, row) only.

    ``step`` is that of training, and 0 in evaluations; ``rows`` are row numbers within the global
    batch. What a row draws depends neither on the other rows asked for nor on the length of the
    draw (a longer one begins the same), but on how many draws came before. Counter-based: one
    SplitMix64 stream per row and draw.
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
        """Uniform numbers in [0, 1), float32 (rows, length)."""
        bits = self._bits(length)
        bits >>= np.uint64(40)  # 24 bits fill a float32
        numbers = bits.astype(np.float32)
        numbers *= np.float32(2**-24)
        return numbers

    def integers(self, high: int, length: int) -> np.ndarray:
        """Uniform integers in [0, high), int32 (rows, length); high up to 2**31."""
        bits = self._bits(length)
        bits >>= np.uint64(32)
        bits *= np.uint64(high)
        bits >>= np.uint64(32)
        return bits.astype(np.int32)

    def generators(self) -> list[np.random.Generator]:
        """A numpy generator per row, for draws that do not fit a rectangle."""
        self._draws += 1
        keys = (derive_key(self._base, self._draws, row) for row in self.rows.tolist())
        return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


FEISTEL_ROUNDS = 8
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map each index in [0, n) through a pseudo-random permutation of [0, n) chosen by ``key``.

    A Feistel network over the next power of two, walked until the value falls below n (Black and
    Rogaway 2002): memory of the size of ``indices``, whatever n is. Returns int64.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = bits - bits // 2
    masks = [np.uint64((1 << size) - 1) for size in (bits - low_bits, low_bits)]
    keys = [np.uint64(derive_key(key, i)) for i in range(FEISTEL_ROUNDS)]
    result = np.asarray(indices).astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        high, low = result[outside] >> np.uint64(low_bits), result[outside] & masks[1]
        # An even number of rounds brings unequal halves back in place.
        for i, round_key in enumerate(keys):
            noise = splitmix64((low + np.uint64(1)) * np.uint64(GOLDEN_GAMMA) ^ round_key)
            high, low = low, high ^ (noise & masks[i % 2])
        result[outside] = high << np.uint64(low_bits) | low
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in place on a uint64 array."""
    scratch = x >> np.uint64(30)
    x ^= scratch
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=scratch)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=scratch)
    return x


def shift_right(labels: np.ndarray, pad_token_id: int, decoder_start_token_id: int) -> np.ndarray:
    """Return decoder inputs: ``labels`` (batch, length) one place later, after the start token.

    Ignored labels become padding; the type of the labels is kept.
    """
    start = np.full_like(labels[:, :1], decoder_start_token_id)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORE_INDEX, np.asarray(pad_token_id, shifted.dtype), shifted)
