"""Where sentences end, read off the tokens: no language, no model, no download.

A sentence ends after a token that ends with a full stop, a question or exclamation mark or their
like (quotation marks and brackets may follow), where the next token begins a word that is not in
lower case. Ideographic stops need no new word after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hfseq.data.tokenizers import _table_size, special_ids, word_marks

STOPS = ".?!…‽؟۔։।॥።፧᙮"
FULL_WIDTH = "。．！？｡"
CLOSERS = "\"'”’»›)]}」』）］〉》\n\r"


@dataclass(frozen=True)
class SentenceTables:
    """What each token id says about sentences; bool arrays (vocabulary,).

    stops: ends with a stop. closers: nothing but what may follow a stop. begins: may begin a
    sentence after a stop. hard: after it a sentence may begin without a space. spaces: nothing but
    a space. lower: begins with a lower-case letter (no token of an uncased vocabulary).
    """

    stops: np.ndarray
    closers: np.ndarray
    begins: np.ndarray
    hard: np.ndarray
    spaces: np.ndarray
    lower: np.ndarray

    def ends(self, ids: np.ndarray, text: np.ndarray) -> np.ndarray:
        """Where sentences end; ``ids`` int and ``text`` bool (rows, length), False for padding.

        The last token of a document is not marked for being the last.
        """
        stops = self.stops[ids] & text
        closers = self.closers[ids] & text
        for _ in range(3):  # as many tokens of quotation marks, brackets and line breaks
            stops[:, 1:] |= stops[:, :-1] & closers[:, 1:]
        lower = self.lower[ids]
        lower[:, :-1] |= self.spaces[ids[:, :-1]] & lower[:, 1:]
        following = np.zeros_like(stops)
        following[:, :-1] = (
            (self.begins[ids[:, 1:]] & ~lower[:, 1:] | self.hard[ids[:, :-1]])
            & ~self.closers[ids[:, 1:]]
            & text[:, 1:]
        )
        return stops & following


def sentence_tables(tokenizer: Any, size: int | None = None) -> SentenceTables:
    """Read the tables off a vocabulary with byte-level, SentencePiece or WordPiece marks.

    Where it marks no words, any token that is not in lower case may begin a sentence.
    """
    vocabulary = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    texts = {token: _text(tokenizer, token) for token, i in vocabulary.items() if not special[i]}
    cased = any(text.lstrip()[:1].isupper() for text in texts.values())
    mark, starts = word_marks(vocabulary)
    tables = np.zeros((6, _table_size(tokenizer, size)), bool)
    for token, text in texts.items():
        bare = text.strip().rstrip(CLOSERS)
        marked = token.startswith(starts) if starts else not (mark and token.startswith(mark))
        opens = bool(starts) and marked and "\n" not in text  # a quotation mark after a space
        tables[:, vocabulary[token]] = (
            bare.endswith(tuple(STOPS + FULL_WIDTH)),
            bool(text) and not text.strip(CLOSERS) and not opens,
            marked,
            bare.endswith(tuple(FULL_WIDTH)) or "\n" in text,
            not text.strip(" "),
            cased and text.lstrip()[:1].islower(),
        )
    return SentenceTables(*tables)


def _text(tokenizer: Any, token: str) -> str:
    if token.startswith("##"):
        return token[2:]
    return str(tokenizer.convert_tokens_to_string([token])).replace("▁", " ")
