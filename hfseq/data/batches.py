"""Batches and random numbers as pure functions of (seed, step): resuming needs no state at all."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from hfseq.data.packing import Rows
from hfseq.errors import DataError

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15


def derive(*parts: int | str) -> int:
    """A 64-bit key that depends on every part."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in place on a uint64 array."""
    scratch = x >> np.uint64(30)
    x ^= scratch
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=scratch)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=scratch)
    return x


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map each index in [0, n) through a pseudo-random permutation of [0, n) chosen by ``key``.

    A Feistel network over the next power of two, walked until the value falls below n (Black and
    Rogaway 2002): memory of the size of ``indices``, whatever n is. Returns int64.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = bits - bits // 2
    keys = [np.uint64(derive(key, i)) for i in range(ROUNDS)]
    result = np.asarray(indices).astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        result[outside] = _feistel(result[outside], bits - low_bits, low_bits, keys)
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def _feistel(x: np.ndarray, high_bits: int, low_bits: int, keys: list[np.uint64]) -> np.ndarray:
    high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
    masks = [np.uint64((1 << bits) - 1) for bits in (high_bits, low_bits)]
    for i, key in enumerate(keys):  # an even number of rounds brings unequal halves back in place
        noise = mix((low + np.uint64(1)) * np.uint64(GOLDEN) ^ key)
        high, low = low, high ^ (noise & masks[i % 2])
    return high << np.uint64(low_bits) | low


class Batches:
    """Which rows make up the global batch of a step, a pure function of (seed, step).

    Every epoch visits each row once, in an order of its own. The last batch of an epoch is filled
    up with rows marked invalid, or left out with ``drop``.

    Raises:
        DataError: there are no rows, or with ``drop`` fewer than a batch.
    """

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, shuffle: bool = True, drop: bool = False
    ):
        self.rows, self.batch_size, self.seed, self.shuffle = rows, batch_size, seed, shuffle
        self.steps = len(rows) // batch_size if drop else -(-len(rows) // batch_size)
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
            order = permute(order, len(self.rows), derive("epoch", self.seed, epoch))
        return order, valid

    def fetch(self, step: int, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return ``part`` of the batch (this process's share): the rows' arrays and "valid"."""
        indices, valid = self.indices(step)
        return self.rows.fetch(indices[part], self.rows.width(indices)) | {"valid": valid[part]}


class RowRandom:
    """Random numbers for the rows of a batch, each depending on (seed, step, row) only.

    ``rows`` are row numbers within the global batch. What a row draws depends neither on the
    other rows asked for nor on the length of the draw (a longer one begins the same), but on how
    many draws came before. Counter-based: one SplitMix64 stream per row and draw.
    """

    def __init__(self, seed: int, step: int, rows: np.ndarray):
        self.rows = np.asarray(rows, np.uint64)
        self._base, self._draws = derive("rows", seed, step), 0

    def _bits(self, length: int) -> np.ndarray:
        keys = mix(
            (self.rows + np.uint64(1)) * np.uint64(GOLDEN)
            ^ np.uint64(derive(self._base, self._draws))
        )
        self._draws += 1
        steps = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return mix(keys[:, None] + steps)

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
        keys = (derive(self._base, self._draws, row) for row in self.rows.tolist())
        return [np.random.Generator(np.random.Philox(key=key)) for key in keys]
