"""From parallel text to rows: both sides as tokens, one pair a row, or several (PackedPairs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hfseq.data.pair_packing import PackedPairs
from hfseq.data.pair_store import PairStore, PairSums, Side, padded_sums, place, select_pairs
from hfseq.data.tokenization import Encoder, tokenize_with
from hfseq.errors import UsageError

__all__ = ["PackedPairs", "PairRows", "PairStore", "SideEncoder", "tokenize_pairs"]

SHARES = (0.3, 0.6, 0.85, 0.95, 0.995, 1.0)  # of the pairs, for which there is a width


class SideEncoder(Encoder):
    """Turns the sentences of one side into ids; every sentence ends with the end token.

    Targets are encoded as such (Marian has a vocabulary of its own for them, mBART another language
    code). No sentence is left out, so that the two sides stay aligned.
    """

    def __init__(self, tokenizer: Any, side: str, prefix: str = ""):
        super().__init__(tokenizer)
        self.side, self.prefix = side, prefix
        self.switches = side == "target" and hasattr(tokenizer, "_switch_to_target_mode")
        if tokenizer.eos_token_id is None:
            raise UsageError(
                "translation needs a tokenizer with an eos_token, or no translation would ever "
                "end; this one has none: set tokenizer.eos_token, or train one with "
                "scripts/train_tokenizer.py --model_type marian"
            )
        self.end: list[int] = []
        sample = self._rows(["a"])[0]
        if tokenizer.eos_token_id not in sample:
            self.end = [tokenizer.eos_token_id]
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        ordinary = [place for place, token in enumerate(sample) if token not in special]
        #: Special tokens at the end of every sentence; truncation keeps them.
        self.tail = len(sample) - 1 - max(ordinary, default=-1) + len(self.end)

    @property
    def options(self) -> list[Any]:
        """What the ids depend on, beside text and tokenizer."""
        language = getattr(self.tokenizer, "tgt_lang", None) if self.switches else None
        return [self.side if self.switches else "sentence", self.prefix, self.end, language]

    def keeps(self, text: str | None) -> bool:
        """Keep every sentence."""
        return True

    def _rows(self, texts: list[str]) -> list[list[int]]:
        if self.switches:
            rows = self.tokenizer(text_target=texts, verbose=False)["input_ids"]
        else:
            rows = super()._rows([self.prefix + text for text in texts] if self.prefix else texts)
        return [[*row, *self.end] for row in rows] if self.end else rows


def tokenize_pairs(
    dataset: Any,
    tokenizer: Any,
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

    Raises:
        UsageError: a tokenizer without end token, or limits that leave no room for text.
        DataError: no pair is left, or the cache cannot be read or written.
    """
    sides = []
    for name, limit in (("source", max_source_length), ("target", max_target_length)):
        encode = SideEncoder(tokenizer, name, (source_prefix or "") if name == "source" else "")
        if limit <= encode.tail:
            raise UsageError(
                f"--max_{name}_length {limit} leaves no room for text beside {encode.tail} special "
                f"tokens: give {encode.tail + 1} or more"
            )
        store = tokenize_with(
            encode, dataset, name, cache_dir=cache_dir, num_proc=num_proc, overwrite=overwrite,
            description=f"{description}, {name}",
        )  # fmt: skip
        sides.append(Side(store, limit, encode.tail))
    return select_pairs(sides[0], sides[1], drop_long, description)


class PairRows:
    """One pair a row: row i is the i-th pair in order of length, ties in order of the data.

    A batch is as wide as its longest pair needs, in one of six widths a side, which suit the data
    and go together: a step compiles six times at most. With ``pad_to_max_length`` there is one.
    Rows have "target_ids" and "target_segment_ids" beside "input_ids" and "segment_ids", but no
    positions, which begin at 0.
    """

    def __init__(self, pairs: PairStore, pad_to_max_length: bool = False):
        self.pairs = pairs
        source, target = pairs.lengths
        limits = [side.max_length for side in pairs.sides]
        #: Widths of each side, int64 (2, levels), the widest last.
        self.widths = np.array(limits)[:, None]
        if not pad_to_max_length:
            self.widths = np.stack(
                [_widths(*side) for side in zip(pairs.lengths, limits, strict=True)]
            )
        level = np.maximum(*map(np.searchsorted, self.widths, (source, target)))
        order = np.lexsort((np.arange(len(pairs)), source + target, level))
        self.levels, self.order = level[order], pairs.kept[order]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def sums(self) -> PairSums:
        """The pairs' own lengths."""
        return self.pairs.sums

    @property
    def padded_sums(self) -> PairSums:
        """The same with padding, where every row is as wide as the widest."""
        return padded_sums(len(self), self.width(np.arange(len(self))))

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
        found: dict[str, np.ndarray] = {}
        names = ("", "target_")
        for side, columns, name in zip(
            self.pairs.sides, width or self.width(indices), names, strict=True
        ):
            ids = place(side, rows, starts, chosen, (len(chosen), columns))
            real = np.arange(columns) < side.lengths[chosen][:, None]
            found |= {f"{name or 'input_'}ids": ids, f"{name}segment_ids": real.astype(np.int32)}
        return found


def _widths(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return widths, multiples of eight up to ``longest``, that these shares of the lengths fit."""
    needed = np.quantile(lengths, SHARES, method="higher")
    return np.minimum(np.ceil(needed / 8) * 8, longest).astype(np.int64)
