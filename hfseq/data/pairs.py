"""Tokenizes parallel text and builds rows of one pair (`PairRows`) or several (`PackedPairs`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.data.batches import derive_key, permute
from hfseq.data.store import TokenStore
from hfseq.data.tokenize import DocumentEncoder, tokenize_column
from hfseq.errors import DataError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase
logger = logging.getLogger(__name__)


class SideEncoder(DocumentEncoder):
    """Tokenizes one side of parallel text: the source or the target sentences.

    Every sentence ends with the EOS token. Targets are encoded in the tokenizer's target mode, in
    which Marian uses its target vocabulary and mBART the target language code. No sentence is left
    out, so that both sides stay aligned.

    Args:
        tokenizer: The tokenizer.
        side: "source" or "target".
        prefix: Prefix of every sentence.

    Attributes:
        tail: Number of special tokens at the end of every sentence, which truncation keeps.

    Raises:
        UsageError: The tokenizer has no EOS token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, side: str, prefix: str = ""):
        super().__init__(tokenizer)
        self.side, self.prefix = side, prefix
        self.uses_target_mode = side == "target" and hasattr(tokenizer, "_switch_to_target_mode")
        if tokenizer.eos_token_id is None:
            raise UsageError(
                "translation requires a tokenizer with an EOS token, because generation would "
                "not end without it: set tokenizer.eos_token, or train a tokenizer with "
                "scripts/train_tokenizer.py --model_type marian"
            )
        self.eos_ids: list[int] = []
        sample = self._rows(["a"])[0]
        if tokenizer.eos_token_id not in sample:
            self.eos_ids = [tokenizer.eos_token_id]
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        ordinary = [position for position, token in enumerate(sample) if token not in special]
        self.tail = len(sample) - 1 - max(ordinary, default=-1) + len(self.eos_ids)

    @property
    def options(self) -> list[Any]:
        """All values, apart from the text and the tokenizer, that determine the token ids.

        They are part of the cache key.
        """
        language = getattr(self.tokenizer, "tgt_lang", None) if self.uses_target_mode else None
        return [
            self.side if self.uses_target_mode else "sentence",
            self.prefix,
            self.eos_ids,
            language,
        ]

    def should_keep(self, text: str | None) -> bool:
        """Returns true for every text, to keep both sides aligned."""
        return True

    def _rows(self, texts: list[str]) -> list[list[int]]:
        if self.uses_target_mode:
            rows = self.tokenizer(text_target=texts, verbose=False)["input_ids"]
        else:
            rows = super()._rows([self.prefix + text for text in texts] if self.prefix else texts)
        return [[*row, *self.eos_ids] for row in rows] if self.eos_ids else rows


def tokenize_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    cache_dir: str | Path,
    num_proc: int | None = None,
    overwrite: bool = False,
    drop_long: bool = False,
    description: str = "Tokenizing",
    source_prefix: str | None = None,
) -> PairStore:
    """Tokenizes the columns "source" and "target" of a dataset, and caches the tokens.

    The cache does not depend on the maximum lengths.

    Args:
        dataset: The pairs.
        tokenizer: The tokenizer.
        max_source_length: Maximum source length in tokens.
        max_target_length: Maximum target length in tokens.
        cache_dir: Directory of cached tokens.
        num_proc: Number of processes.
        overwrite: Whether to ignore a cached result.
        drop_long: Whether to leave out pairs that exceed a maximum length instead of truncating
            them. The number of left-out or truncated pairs is stored in `stats` and logged.
        description: Label of the progress bar.
        source_prefix: Prefix of every source sentence.

    Returns:
        The tokenized pairs.

    Raises:
        UsageError: A maximum length leaves no space for text.
        DataError: No pair is left.
    """
    sides = []
    for name, limit in (("source", max_source_length), ("target", max_target_length)):
        encode = SideEncoder(tokenizer, name, (source_prefix or "") if name == "source" else "")
        if limit <= encode.tail:
            raise UsageError(
                f"--max_{name}_length {limit} leaves no space for text next to {encode.tail} "
                f"special tokens: use {encode.tail + 1} or more"
            )
        store = tokenize_column(
            encode,
            dataset,
            name,
            cache_dir=cache_dir,
            num_proc=num_proc,
            overwrite=overwrite,
            description=f"{description}, {name}",
        )
        sides.append(PairSide(store, limit, encode.tail))
    return select_pairs(sides[0], sides[1], drop_long, description)


@dataclass
class PairSide:
    """The tokens of one side.

    Truncation removes the end of the text and keeps the special tokens after it.

    Attributes:
        store: The tokens.
        max_length: Maximum length of a sentence in tokens.
        tail: Number of special tokens at the end of a sentence.
        lengths: Length of each truncated sentence, int32.
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
        """Copies the tokens of a sentence to `out`, `(lengths[pair],)`."""
        tokens = self.store[pair]
        out[:] = tokens[: len(out)]
        if len(tokens) > len(out):
            out[len(out) - self.tail :] = tokens[len(tokens) - self.tail :]

    def fill_rows(
        self, rows: np.ndarray, starts: np.ndarray, pairs: np.ndarray, shape: tuple[int, int]
    ) -> np.ndarray:
        """Copies sentences into padded rows.

        Args:
            rows: Row of each sentence, `(sentences,)`.
            starts: First column of each sentence, `(sentences,)`.
            pairs: Index of each sentence, `(sentences,)`.
            shape: Shape of the result.

        Returns:
            Token ids, int32 of shape `shape`.
        """
        ids = np.full(shape, self.store.pad_token_id, np.int32)
        for row, start, pair in zip(rows.tolist(), starts.tolist(), pairs.tolist(), strict=True):
            self.copy(pair, ids[row, start : start + self.lengths[pair]])
        return ids


class PairSums(NamedTuple):
    """Sums over pairs of texts, from which the FLOPs of a training step are computed.

    Attributes:
        source: Source tokens.
        target: Target tokens.
        source_squares: Squared source lengths, for self-attention in the encoder.
        target_squares: Squared target lengths, for self-attention in the decoder.
        products: Products of source and target length, for cross-attention.
    """

    source: float
    target: float
    source_squares: float
    target_squares: float
    products: float


@dataclass
class PairStore:
    """Tokenized pairs of source and target sentences.

    Attributes:
        source: The source sentences.
        target: The target sentences.
        pair_indices: Indices of the sentences to use, int64 `(pairs,)`.
        stats: Numbers for logs and model cards.
    """

    source: PairSide
    target: PairSide
    pair_indices: np.ndarray
    stats: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pair_indices)

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        """The source sentences and the target sentences."""
        return self.source, self.target

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens of each source and target, int32 `(pairs,)`."""
        return self.source.lengths[self.pair_indices], self.target.lengths[self.pair_indices]

    @property
    def sums(self) -> PairSums:
        """The sums of lengths and of their products over all pairs."""
        source, target = (lengths.astype(np.float64) for lengths in self.lengths)
        products = (source @ source, target @ target, source @ target)
        return PairSums(float(source.sum()), float(target.sum()), *map(float, products))


def select_pairs(
    source: PairSide, target: PairSide, drop_long: bool, description: str = "pairs"
) -> PairStore:
    """Combines two sides into pairs, and skips long pairs if `drop_long` is set.

    Raises:
        DataError: The sides have different numbers of sentences, or no pair is left.
    """
    if len(source.store) != len(target.store):
        raise DataError(
            f"{description}: the cache contains {len(source.store)} sources and "
            f"{len(target.store)} targets; rebuild it with --overwrite_cache"
        )
    long = source.long | target.long
    kept_indices = np.flatnonzero(~long) if drop_long else np.arange(len(long))
    count, total = int(long.sum()), len(long)
    limits = f"{source.max_length} source or {target.max_length} target tokens"
    if not len(kept_indices):
        raise DataError(
            f"{description}: all {total} pairs are longer than {limits}; increase "
            "--max_source_length and --max_target_length, or use --truncate_long_pairs"
        )
    if count:
        remedy = (
            "left out (use --truncate_long_pairs to truncate them)" if drop_long else "truncated"
        )
        logger.warning(
            "%s: %d of %d pairs are longer than %s and are %s",
            description,
            count,
            total,
            limits,
            remedy,
        )
    pairs = PairStore(source, target, kept_indices)
    tokens = [int(lengths.sum()) for lengths in pairs.lengths]
    pairs.stats = {
        "documents": len(kept_indices),
        "tokens": sum(tokens),
        "source_tokens": tokens[0],
        "target_tokens": tokens[1],
        "dropped": count if drop_long else 0,
        "truncated": 0 if drop_long else count,
    }
    return pairs


#: Fractions of the pairs that fit into each width.
WIDTH_QUANTILES = (0.3, 0.6, 0.85, 0.95, 0.995, 1.0)


class _PairRowsBase:
    """Base class of rows of pairs, with the sums that determine the FLOPs of a training step."""

    pairs: PairStore

    def __len__(self) -> int:
        raise NotImplementedError

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns the numbers of source and target columns of a batch of these rows."""
        raise NotImplementedError

    @property
    def sums(self) -> PairSums:
        """The sums of the lengths of all pairs."""
        return self.pairs.sums

    @property
    def padded_sums(self) -> PairSums:
        """The sums over all rows, including padding, if every row has the maximum width."""
        source, target = map(float, self.width(np.arange(len(self))))
        each = (source, target, source * source, target * target, source * target)
        return PairSums(*(len(self) * part for part in each))


class PairRows(_PairRowsBase):
    """One pair per row, sorted by length. Ties keep the order of the data.

    A batch has one of at most six combinations of source and target width, which are derived from
    the lengths of the pairs. The training step is therefore compiled at most six times. With
    `pad_to_max_length` there is only one combination.

    Rows have "target_ids" and "target_segment_ids" in addition to "input_ids" and "segment_ids".
    They have no position ids, because every sequence starts at position 0.

    Attributes:
        widths: Source and target width of each combination, int64 `(2, combinations)`, in
            ascending order.
    """

    max_runs = 2  # the pair and its padding

    def __init__(self, pairs: PairStore, pad_to_max_length: bool = False):
        self.pairs = pairs
        source, target = pairs.lengths
        self.widths = np.array([[side.max_length] for side in pairs.sides])
        if not pad_to_max_length:
            # Multiples of eight, at most the maximum length, that fit these fractions of the pairs.
            needed = np.quantile(
                np.stack(pairs.lengths), WIDTH_QUANTILES, axis=1, method="higher"
            ).T
            self.widths = np.minimum(np.ceil(needed / 8) * 8, self.widths).astype(np.int64)
        level = np.maximum(*map(np.searchsorted, self.widths, (source, target)))
        order = np.lexsort((np.arange(len(pairs)), source + target, level))
        self.levels, self.order = level[order], pairs.pair_indices[order]

    def __len__(self) -> int:
        return len(self.order)

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns the numbers of source and target columns of a batch of these rows."""
        level = int(self.levels[np.asarray(indices)].max(initial=0))
        return int(self.widths[0, level]), int(self.widths[1, level])

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows."""
        pair_indices = self.order[np.asarray(indices)]
        rows, starts = np.arange(len(pair_indices)), np.zeros(len(pair_indices), np.int64)
        arrays: dict[str, np.ndarray] = {}
        widths = zip(self.pairs.sides, width or self.width(indices), ("", "target_"), strict=True)
        for side, columns, name in widths:
            ids = side.fill_rows(rows, starts, pair_indices, (len(pair_indices), columns))
            real = np.arange(columns) < side.lengths[pair_indices][:, None]
            arrays |= {f"{name or 'input_'}ids": ids, f"{name}segment_ids": real.astype(np.int32)}
        return arrays


class PackedPairs(_PairRowsBase):
    """Rows of several pairs, with the source and the target of a pair in the same row.

    Pairs are shuffled, because files are often sorted, and divided into groups. Each group is
    packed separately, so that sources and targets do not exceed their maximum lengths. The result
    depends only on the lengths of the pairs.

    The segment ids of a pair, in source and target, are its number within the row, from 1. In
    addition to the arrays of `Rows` there are "target_ids", "target_segment_ids" and
    "target_position_ids".
    """

    def __init__(self, pairs: PairStore):
        self.pairs = pairs
        self.max_lengths = (pairs.source.max_length, pairs.target.max_length)
        row_of, count = plan_rows(*pairs.lengths, self.max_lengths)
        order = np.argsort(row_of, kind="stable")
        self.order = pairs.pair_indices[order]
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def max_runs(self) -> int:
        """An upper bound of the number of segments in a row, including padding."""
        return 1 + int(np.diff(self.offsets).max())

    @property
    def fill_ratio(self) -> tuple[float, float]:
        """The fractions of source and target columns that contain tokens."""
        sums, lengths = self.sums, self.max_lengths
        return sums.source / (len(self) * lengths[0]), sums.target / (len(self) * lengths[1])

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns the maximum lengths of source and target, which are the width of every batch."""
        return self.max_lengths

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows."""
        indices = np.asarray(indices)
        counts = self.offsets[indices + 1] - self.offsets[indices]
        rows = np.repeat(np.arange(len(indices)), counts)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        pair_indices = self.order[self.offsets[indices][rows] + rank]
        arrays: dict[str, np.ndarray] = {}
        for side, columns, name in zip(
            self.pairs.sides, self.max_lengths, ("", "target_"), strict=True
        ):
            shape, lengths = (len(indices), columns), side.lengths[pair_indices].astype(np.int64)
            offsets_flat = np.cumsum(lengths) - lengths
            starts = offsets_flat - offsets_flat[np.flatnonzero(rank == 0)][rows]
            within = np.arange(int(lengths.sum())) - np.repeat(offsets_flat, lengths)
            flat = np.repeat(rows * columns + starts, lengths) + within
            segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            segments.reshape(-1)[flat] = np.repeat(rank + 1, lengths)
            positions.reshape(-1)[flat] = within
            arrays |= {
                f"{name or 'input_'}ids": side.fill_rows(rows, starts, pair_indices, shape),
                f"{name}segment_ids": segments,
                f"{name}position_ids": positions,
            }
        return arrays


GROUP_SIZE = 2048  # pairs that are packed together


def plan_rows(
    source: np.ndarray,
    target: np.ndarray,
    max_lengths: tuple[int, int],
    group_size: int = GROUP_SIZE,
) -> tuple[np.ndarray, int]:
    """Assigns pairs to rows with the first-fit decreasing algorithm.

    Pairs are divided into groups, which are packed separately and in parallel.

    Args:
        source: Source lengths, `(pairs,)`, at most the first of `max_lengths`.
        target: Target lengths, `(pairs,)`, at most the second of `max_lengths`.
        max_lengths: Numbers of source and target columns of a row.
        group_size: Maximum number of pairs per group.

    Returns:
        The row of each pair, int64 `(pairs,)`, and the number of rows.
    """
    total = len(source)
    groups = -(-total // group_size)
    each = -(-total // groups)
    order = permute(np.arange(total), total, derive_key("pairs"))
    # One row per group. Unused slots at the end are treated as pairs of length 0.
    slots = np.full(groups * each, -1, np.int64)
    slots[:total] = order
    members = slots.reshape(groups, each)
    lengths = [np.where(members < 0, 0, side[members]) for side in (source, target)]
    size = np.maximum(lengths[0] / max_lengths[0], lengths[1] / max_lengths[1])
    falling = np.argsort(-size, axis=1, kind="stable")
    members = np.take_along_axis(members, falling, axis=1)
    lengths = [np.take_along_axis(side, falling, axis=1) for side in lengths]
    rows = _first_fit(lengths[0], lengths[1], max_lengths)
    numbers = rows + np.arange(groups)[:, None] * (rows.max() + 1)
    real = members >= 0
    used, compact = np.unique(numbers[real], return_inverse=True)
    row_of = np.empty(total, np.int64)
    row_of[members[real]] = compact
    return row_of, len(used)


def _first_fit(source: np.ndarray, target: np.ndarray, max_lengths: tuple[int, int]) -> np.ndarray:
    """Assigns each pair to the first row of its group that has enough space for both sides.

    Args:
        source: Source lengths, `(groups, pairs)`.
        target: Target lengths, `(groups, pairs)`.
        max_lengths: Numbers of source and target columns of a row.
    """
    groups, each = source.shape
    rows = np.zeros((groups, each), np.int64)
    dtype = np.int16 if max(max_lengths) < 2**15 else np.int32
    source, target = source.astype(dtype), target.astype(dtype)
    free = [np.full((groups, 64), size, dtype) for size in max_lengths]
    opened, every = 1, np.arange(groups)
    for number in range(each):
        if opened == free[0].shape[1]:
            free = [
                np.concatenate([left, np.full_like(left, size)], axis=1)
                for left, size in zip(free, max_lengths, strict=True)
            ]
        needs = source[:, number], target[:, number]
        window = opened + 1
        fits = free[0][:, :window] >= needs[0][:, None]
        fits &= free[1][:, :window] >= needs[1][:, None]
        row = fits.argmax(axis=1)
        free[0][every, row] -= needs[0]
        free[1][every, row] -= needs[1]
        rows[:, number] = row
        opened = max(opened, int(row.max()) + 1)
    return rows
