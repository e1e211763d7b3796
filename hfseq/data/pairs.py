"""From parallel text to rows: both sides as tokens, one pair a row, or several (PackedPairs)."""

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
    """Turns the sentences of one side into ids; every sentence ends with the end token.

    Targets are encoded as such (Marian has a vocabulary of its own for them, mBART another language
    code). No sentence is left out, so that the two sides stay aligned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, side: str, prefix: str = ""):
        super().__init__(tokenizer)
        self.side, self.prefix = side, prefix
        self.uses_target_mode = side == "target" and hasattr(tokenizer, "_switch_to_target_mode")
        if tokenizer.eos_token_id is None:
            raise UsageError(
                "translation needs a tokenizer with an eos_token, or no translation would ever "
                "end; this one has none: set tokenizer.eos_token, or train one with "
                "scripts/train_tokenizer.py --model_type marian"
            )
        self.eos_ids: list[int] = []
        sample = self._rows(["a"])[0]
        if tokenizer.eos_token_id not in sample:
            self.eos_ids = [tokenizer.eos_token_id]
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        ordinary = [place for place, token in enumerate(sample) if token not in special]
        #: Special tokens at the end of every sentence; truncation keeps them.
        self.tail = len(sample) - 1 - max(ordinary, default=-1) + len(self.eos_ids)

    @property
    def options(self) -> list[Any]:
        """What the ids depend on, beside text and tokenizer."""
        language = getattr(self.tokenizer, "tgt_lang", None) if self.uses_target_mode else None
        return [
            self.side if self.uses_target_mode else "sentence",
            self.prefix,
            self.eos_ids,
            language,
        ]

    def should_keep(self, text: str | None) -> bool:
        """Keep every sentence."""
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
    description: str = "Tokenising",
    source_prefix: str | None = None,
) -> PairStore:
    """Tokenise the columns "source" and "target" of a dataset once, and keep both in a cache.

    Pairs with a longer side than the limits are left out with ``drop_long``, otherwise that side is
    cut; both are counted in ``facts`` and logged. ``source_prefix`` goes before every source. The
    cache does not depend on the limits.
    """
    sides = []
    for name, limit in (("source", max_source_length), ("target", max_target_length)):
        encode = SideEncoder(tokenizer, name, (source_prefix or "") if name == "source" else "")
        if limit <= encode.tail:
            raise UsageError(
                f"--max_{name}_length {limit} leaves no room for text beside {encode.tail} special "
                f"tokens: give {encode.tail + 1} or more"
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

    def place(
        self, rows: np.ndarray, starts: np.ndarray, pairs: np.ndarray, shape: tuple[int, int]
    ) -> np.ndarray:
        """Write sentences into padded rows; returns ids of ``shape``.

        ``rows``, ``starts`` and ``pairs`` are (sentences,): where each goes, and which it is.
        """
        ids = np.full(shape, self.store.pad_token_id, np.int32)
        for row, start, pair in zip(rows.tolist(), starts.tolist(), pairs.tolist(), strict=True):
            self.copy(pair, ids[row, start : start + self.lengths[pair]])
        return ids


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

    source: PairSide
    target: PairSide
    pair_indices: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pair_indices)

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        """Source and target."""
        return self.source, self.target

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each pair's source and target, int32 (pairs,)."""
        return self.source.lengths[self.pair_indices], self.target.lengths[self.pair_indices]

    @property
    def sums(self) -> PairSums:
        """Tokens of all pairs, and products of their lengths."""
        source, target = (lengths.astype(np.float64) for lengths in self.lengths)
        products = (source @ source, target @ target, source @ target)
        return PairSums(float(source.sum()), float(target.sum()), *map(float, products))


def select_pairs(
    source: PairSide, target: PairSide, drop_long: bool, description: str = "pairs"
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
            description,
            count,
            total,
            limits,
            remedy,
        )
    pairs = PairStore(source, target, kept)
    tokens = [int(lengths.sum()) for lengths in pairs.lengths]
    pairs.facts = {
        "documents": len(kept),
        "tokens": sum(tokens),
        "source_tokens": tokens[0],
        "target_tokens": tokens[1],
        "dropped": count if drop_long else 0,
        "truncated": 0 if drop_long else count,
    }
    return pairs


WIDTH_QUANTILES = (0.3, 0.6, 0.85, 0.95, 0.995, 1.0)  # of the pairs, for which there is a width


class _Rows:
    """What rows of pairs have in common: the numbers that training's arithmetic depends on."""

    pairs: PairStore

    def __len__(self) -> int:
        raise NotImplementedError

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Columns of the source and of the target in a batch of these rows."""
        raise NotImplementedError

    @property
    def sums(self) -> PairSums:
        """The pairs' own lengths."""
        return self.pairs.sums

    @property
    def padded_sums(self) -> PairSums:
        """The same with padding, where every row is as wide as the widest and full."""
        source, target = map(float, self.width(np.arange(len(self))))
        each = (source, target, source * source, target * target, source * target)
        return PairSums(*(len(self) * part for part in each))


class PairRows(_Rows):
    """One pair a row: row i is the i-th pair in order of length, ties in order of the data.

    A batch is as wide as its longest pair needs, in one of six widths a side, which suit the data
    and go together: a step compiles six times at most. With ``pad_to_max_length`` there is one.
    Rows have "target_ids" and "target_segment_ids" beside "input_ids" and "segment_ids", but no
    positions, which begin at 0.
    """

    max_runs = 2  # the pair and its padding

    def __init__(self, pairs: PairStore, pad_to_max_length: bool = False):
        self.pairs = pairs
        source, target = pairs.lengths
        #: Widths of each side, int64 (2, levels), the widest last.
        self.widths = np.array([[side.max_length] for side in pairs.sides])
        if not pad_to_max_length:
            # Multiples of eight up to the longest, which these shares of the lengths fit.
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
        """Columns of the source and of the target in a batch of these rows."""
        level = int(self.levels[np.asarray(indices)].max(initial=0))
        return int(self.widths[0, level]), int(self.widths[1, level])

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Copy these rows out."""
        chosen = self.order[np.asarray(indices)]
        rows, starts = np.arange(len(chosen)), np.zeros(len(chosen), np.int64)
        arrays: dict[str, np.ndarray] = {}
        widths = zip(self.pairs.sides, width or self.width(indices), ("", "target_"), strict=True)
        for side, columns, name in widths:
            ids = side.place(rows, starts, chosen, (len(chosen), columns))
            real = np.arange(columns) < side.lengths[chosen][:, None]
            arrays |= {f"{name or 'input_'}ids": ids, f"{name}segment_ids": real.astype(np.int32)}
        return arrays


class PackedPairs(_Rows):
    """Rows of several pairs, each of which has its source and its target in the same row.

    Pairs are shuffled (files are often sorted), cut into groups, and each group is packed by itself
    so that both sides fit. The plan is a function of the lengths alone. Segments count the pairs of
    a row from 1 on both sides; see ``Rows`` for the arrays, which "target_ids",
    "target_segment_ids" and "target_position_ids" join.
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
        """A bound of the runs of equal segments in any row, padding being one."""
        return 1 + int(np.diff(self.offsets).max())

    @property
    def fill_ratio(self) -> tuple[float, float]:
        """Share of the rows' source and target columns that hold tokens."""
        sums, room = self.sums, self.max_lengths
        return sums.source / (len(self) * room[0]), sums.target / (len(self) * room[1])

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Columns of the source and of the target: always the greatest lengths."""
        return self.max_lengths

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Copy these rows out."""
        indices = np.asarray(indices)
        counts = self.offsets[indices + 1] - self.offsets[indices]
        rows = np.repeat(np.arange(len(indices)), counts)
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = self.order[self.offsets[indices][rows] + rank]
        arrays: dict[str, np.ndarray] = {}
        for side, columns, name in zip(
            self.pairs.sides, self.max_lengths, ("", "target_"), strict=True
        ):
            shape, lengths = (len(indices), columns), side.lengths[chosen].astype(np.int64)
            before = np.cumsum(lengths) - lengths
            starts = before - before[np.flatnonzero(rank == 0)][rows]
            within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
            flat = np.repeat(rows * columns + starts, lengths) + within
            segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            segments.reshape(-1)[flat] = np.repeat(rank + 1, lengths)
            positions.reshape(-1)[flat] = within
            arrays |= {
                f"{name or 'input_'}ids": side.place(rows, starts, chosen, shape),
                f"{name}segment_ids": segments,
                f"{name}position_ids": positions,
            }
        return arrays


GROUP_SIZE = 2048  # pairs that share rows


def plan_rows(
    source: np.ndarray,
    target: np.ndarray,
    max_lengths: tuple[int, int],
    group_size: int = GROUP_SIZE,
) -> tuple[np.ndarray, int]:
    """Say which row each pair goes to: first fit by falling length, in all groups at once.

    ``source`` and ``target`` are lengths (pairs,), none above ``room``. Returns rows, int64
    (pairs,), and how many there are.
    """
    total = len(source)
    groups = -(-total // group_size)
    each = -(-total // groups)
    order = permute(np.arange(total), total, derive_key("pairs"))
    # Groups are columns; places that are left over in the last ones hold pairs of no length.
    filled = np.full(groups * each, -1, np.int64)
    filled[:total] = order
    members = filled.reshape(groups, each)
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


def _first_fit(source: np.ndarray, target: np.ndarray, room: tuple[int, int]) -> np.ndarray:
    """Put the pairs of each group, (groups, pairs), into the first row with room for both sides."""
    groups, each = source.shape
    rows = np.zeros((groups, each), np.int64)
    kind = np.int16 if max(room) < 2**15 else np.int32
    source, target = source.astype(kind), target.astype(kind)
    free = [np.full((groups, 64), size, kind) for size in room]
    opened, every = 1, np.arange(groups)
    for number in range(each):
        if opened == free[0].shape[1]:
            free = [
                np.concatenate([left, np.full_like(left, size)], axis=1)
                for left, size in zip(free, room, strict=True)
            ]
        needs = source[:, number], target[:, number]
        window = opened + 1
        fits = free[0][:, :window] >= needs[0][:, None]
        fits &= free[1][:, :window] >= needs[1][:, None]
        chosen = fits.argmax(axis=1)
        free[0][every, chosen] -= needs[0]
        free[1][every, chosen] -= needs[1]
        rows[:, number] = chosen
        opened = max(opened, int(chosen.max()) + 1)
    return rows
