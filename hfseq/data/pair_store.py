"""Pairs of sentences as tokens: both sides on disk, and what is too long."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hfseq.data.store import TokenStore
from hfseq.errors import DataError

logger = logging.getLogger(__name__)


@dataclass
class Side:
    """The tokens of one side, where sentences longer than ``max_length`` are cut.

    What is cut is the text's end: the ``tail`` special tokens after it stay.
    """

    store: TokenStore
    max_length: int
    tail: int = 1
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        full = np.diff(self.store.offsets)
        self.long = full > self.max_length
        self.lengths = np.minimum(full, self.max_length).astype(np.int32)

    def copy(self, pair: int, out: np.ndarray) -> None:
        """Write the tokens of a sentence into ``out``, (``lengths[pair]``,)."""
        tokens = self.store[pair]
        out[:] = tokens[: len(out)]
        if len(tokens) > len(out):
            out[len(out) - self.tail :] = tokens[len(tokens) - self.tail :]


class PairSums(NamedTuple):
    """What the arithmetic of training on pairs depends on, summed over them.

    Tokens of both sides, what they attend to on their own side, and targets to sources.
    """

    source: float
    target: float
    source_squares: float
    target_squares: float
    products: float


@dataclass
class PairStore:
    """Tokenised pairs: ``kept``, int64 (pairs,), are the sentences of both sides that count."""

    source: Side
    target: Side
    kept: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Source and target."""
        return self.source, self.target

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each pair's source and target, int32 (pairs,)."""
        return self.source.lengths[self.kept], self.target.lengths[self.kept]

    @property
    def sums(self) -> PairSums:
        """Tokens of all pairs, and products of their lengths."""
        source, target = (lengths.astype(np.float64) for lengths in self.lengths)
        products = (source @ source, target @ target, source @ target)
        return PairSums(float(source.sum()), float(target.sum()), *map(float, products))


def select_pairs(
    source: Side, target: Side, drop_long: bool, description: str = "pairs"
) -> PairStore:
    """Pair up two sides, without what is too long where ``drop_long`` says so."""
    if len(source.store) != len(target.store):
        raise DataError(
            f"{description}: {len(source.store)} sources and {len(target.store)} targets are "
            "cached; rebuild them with --overwrite_cache"
        )
    long = source.long | target.long
    kept = np.flatnonzero(~long) if drop_long else np.arange(len(long))
    count, total = int(long.sum()), len(long)
    limits = f"{source.max_length} source or {target.max_length} target tokens"
    if not len(kept):
        raise DataError(
            f"{description}: every one of the {total} pairs is longer than {limits}; give a "
            "greater --max_source_length and --max_target_length, or --truncate_long_pairs"
        )
    if count:
        remedy = "left out; --truncate_long_pairs keeps them, cut" if drop_long else "cut there"
        logger.warning(
            "%s: %d of %d pairs are longer than %s: they are %s",
            description, count, total, limits, remedy,
        )  # fmt: skip
    pairs = PairStore(source, target, kept)
    tokens = [int(lengths.sum()) for lengths in pairs.lengths]
    pairs.facts = {
        "documents": len(kept), "tokens": sum(tokens),
        "source_tokens": tokens[0], "target_tokens": tokens[1],
        "dropped": count if drop_long else 0, "truncated": 0 if drop_long else count,
    }  # fmt: skip
    return pairs


def place(
    side: Side, rows: np.ndarray, starts: np.ndarray, pairs: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Write sentences into padded rows; returns ids of ``shape``.

    ``rows``, ``starts`` and ``pairs`` are (sentences,): where each goes, and which it is.
    """
    ids = np.full(shape, side.store.pad_token_id, np.int32)
    lengths = side.lengths[pairs]
    places = zip(rows.tolist(), starts.tolist(), lengths.tolist(), pairs.tolist(), strict=True)
    for row, start, length, pair in places:
        side.copy(pair, ids[row, start : start + length])
    return ids


def padded_sums(rows: int, room: tuple[int, int]) -> PairSums:
    """Return the sums of rows that are ``room`` wide and full."""
    source, target = map(float, room)
    each = (source, target, source * source, target * target, source * target)
    return PairSums(*(rows * part for part in each))
