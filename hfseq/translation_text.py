"""Source text on its way into the model, and target text on its way out of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

#: Where text may be cut, the best places first: behind sentences, behind clauses, between words.
_ENDS = (
    re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'»”’)\]]))\s+|(?<=[。！？])\s*"),
    re.compile(r"(?<=[,;:–—])\s+|(?<=[，、；：])\s*"),
    re.compile(r"\s+"),
)
#: What a model without a position table, whose tokenizer has no limit either, may read at most.
LONGEST = 1024


class Encoded(NamedTuple):
    """The tokens of one text: none for what has no words, several parts if it was split."""

    parts: list[list[int]]
    joints: list[str] = []  # noqa: RUF012  what stood between the parts
    warning: str | None = None
    error: str | None = None


class SourceEncoder:
    """Turns texts into token ids of at most ``limit``.

    ``prefix`` goes before every text (and before every part of one that is split); ``long_lines``
    is what happens to texts beyond the limit: ``truncate`` and ``split`` leave a warning, ``error``
    an error.
    """

    def __init__(self, tokenizer: Any, limit: int, prefix: str = "", long_lines: str = "truncate"):
        self.tokenizer, self.limit, self.prefix = tokenizer, limit, prefix
        self.long_lines = long_lines
        self._nothing = self._ids([prefix])[0]

    def __call__(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, in their order; blank ones have no parts."""
        places = [place for place, text in enumerate(texts) if text.strip()]
        ids = self._ids([self.prefix + texts[place] for place in places])
        found = dict(zip(places, ids, strict=True))
        return [self._encoded(text, found.get(place)) for place, text in enumerate(texts)]

    def _encoded(self, text: str, ids: list[int] | None) -> Encoded:
        if ids is None or ids == self._nothing:  # blank, or of signs that the tokenizer drops
            return Encoded([])
        if len(ids) <= self.limit:
            return Encoded([ids])
        what = f"{len(ids)} tokens are more than the {self.limit} that fit"
        if self.long_lines == "error":
            return Encoded([], error=f"{what}: shorten it, or let it be split or truncated")
        if self.long_lines == "split":
            parts, joints = self._split(text)
            return Encoded(parts, joints, f"{what}: split into {len(parts)} parts")
        cut = self._ids([self.prefix + text], truncation=True, max_length=self.limit)
        return Encoded(cut, warning=f"{what}: truncated")

    def _split(self, text: str) -> tuple[list[list[int]], list[str]]:
        """Halve ``text`` until every part fits; return their tokens and what lay between them."""
        ids = self._ids([self.prefix + text])[0]
        if len(ids) <= self.limit or len(text) < 2:
            return [ids[: self.limit]], []
        start, end = _middle(text)
        left, joints = self._split(text[:start])
        right, more = self._split(text[end:])
        return left + right, [*joints, " " if end > start else "", *more]

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        if hasattr(self.tokenizer, "_switch_to_input_mode"):  # Marian: an error may have left it
            self.tokenizer._switch_to_input_mode()
        # Not verbose: it would warn of the tokenizer's limit, which may not be the model's.
        return [list(ids) for ids in self.tokenizer(texts, verbose=False, **options)["input_ids"]]


def _middle(text: str) -> tuple[int, int]:
    """Return where the best cut near the middle of ``text`` begins and ends."""
    half = len(text) / 2
    for pattern in _ENDS:
        cuts = [match.span() for match in pattern.finditer(text)]
        cuts = [(start, end) for start, end in cuts if 0 < start and end < len(text)]
        if cuts:
            return min(cuts, key=lambda cut: abs(cut[0] - half))
    return len(text) // 2, len(text) // 2


def source_limit(model: Any, tokenizer: Any, asked: int | None) -> int:
    """Return how many tokens a source may have: the position table's, or fewer where asked."""
    limit = model.max_length()
    if limit is None:
        own = getattr(tokenizer, "model_max_length", None) or LONGEST
        limit = asked or (own if own < 1_000_000 else LONGEST)  # 1e30 stands for "no limit"
    return min(limit, asked or limit)


class TargetDecoder:
    """Turns rows of tokens, which begin with the decoder's start token, into one line of text."""

    def __init__(self, tokenizer: Any, ends: Sequence[int], pad: int | None):
        self.tokenizer, self.ends, self.pad = tokenizer, list(ends), pad
        # Marian's tokenizer has two vocabularies and would decode with the source's.
        own = hasattr(tokenizer, "spm_target")
        self._options: dict[str, Any] = {"use_source_tokenizer": False} if own else {}

    def __call__(self, sequences: np.ndarray) -> list[tuple[str, bool]]:
        """Return for each row its text and whether it came to an end by itself."""
        rows = [self._real(row) for row in sequences[:, 1:]]
        texts = self.tokenizer.batch_decode(
            [row.tolist() for row, _ in rows], skip_special_tokens=True, **self._options
        )
        return [
            (" ".join(text.split("\n")).replace("\r", " ").strip(), ended)
            for text, (_, ended) in zip(texts, rows, strict=True)
        ]

    def _real(self, row: np.ndarray) -> tuple[np.ndarray, bool]:
        ends = np.flatnonzero(np.isin(row, self.ends))
        if len(ends):
            return row[: ends[0]], bool(ends[0] < len(row) - 1)
        padding = len(row) - np.argmax(row[::-1] != self.pad) if self.pad is not None else len(row)
        return row[:padding], False
