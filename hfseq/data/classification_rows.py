"""Rows of tokens out of labelled sentences, one example a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.data.classification import Examples, LabelledSplits
from hfseq.data.classification_arguments import ClassificationArguments
from hfseq.data.pair_vocabulary import install, once
from hfseq.data.tokenization import pad_token_id
from hfseq.data.tokenizers import Family, save_generic, wrap
from hfseq.errors import DataError, UsageError

logger = logging.getLogger(__name__)

BATCH = 4096  # examples a call of the tokenizer
WORDS = Family(
    algorithm="words",
    first=("<pad>", "<unk>", "<sep>"),
    roles={"pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"},
    pair="$A <sep> $B:1",
)


class ExampleRows:
    """Row i is example i, cut to ``max_length`` tokens (the longer sentence of a pair first).

    A batch is as wide as its longest row needs, in one of four widths that end with the longest
    row's, so that a step compiles four times at most; with ``pad_to_max_length`` there is one,
    ``max_length``. Rows have "labels" (rows,) and, with ``types``, "token_type_ids", 1 in a second
    sentence.
    """

    def __init__(
        self,
        examples: Examples,
        labels: np.ndarray,
        tokenizer: Any,
        max_length: int,
        pad_to_max_length: bool = False,
        types: bool = False,
    ):
        self.labels, self.pad = labels, pad_token_id(tokenizer)
        ids, kinds, self.truncated = encode(examples, tokenizer, max_length)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        self.offsets = np.concatenate([[0], lengths.cumsum()])
        self.tokens = {"input_ids": np.concatenate(ids).astype(np.int32)}
        if types:
            self.tokens["token_type_ids"] = np.concatenate(kinds).astype(np.int32)
        longest = min(-(-int(lengths.max()) // 8) * 8, max_length)
        quarters = (-(-longest * part // 32) * 8 for part in (1, 2, 3))
        #: Columns a batch may have, the most last.
        self.widths = (
            [max_length] if pad_to_max_length else
            sorted({min(width, longest) for width in quarters} | {longest})
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.offsets[-1])

    def width(self, indices: np.ndarray) -> int:
        """The narrowest of the widths that holds these rows."""
        longest = (self.offsets[np.asarray(indices) + 1] - self.offsets[indices]).max(initial=1)
        return next(width for width in self.widths if width >= longest)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide."""
        indices, width = np.asarray(indices), width or self.width(indices)
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        real = np.arange(width) < (ends - starts)[:, None]
        rows = {}
        for name, tokens in self.tokens.items():
            rows[name] = np.full(real.shape, self.pad if name == "input_ids" else 0, np.int32)
            for row, start, end in zip(rows[name], starts.tolist(), ends.tolist(), strict=True):
                row[: end - start] = tokens[start:end]
        return rows | {"segment_ids": real.astype(np.int32), "labels": self.labels[indices]}


def encode(
    examples: Examples, tokenizer: Any, max_length: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return ids and types of each example's tokens, and how many examples were cut.

    An example without a token gets one, unknown or padding: attention needs something to look at.

    Raises:
        UsageError: ``max_length`` leaves no room beside the special tokens.
    """
    pair = examples.second is not None
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= special + pair:
        raise UsageError(
            f"--max_seq_length {max_length} leaves no room for text: the tokenizer adds {special} "
            f"special tokens to {'a pair' if pair else 'a sentence'}"
        )
    nothing = tokenizer.unk_token_id
    nothing = pad_token_id(tokenizer) if nothing is None else nothing
    ids: list[list[int]] = []
    kinds: list[list[int]] = []
    cut = 0
    for start in range(0, len(examples), BATCH):
        part = slice(start, start + BATCH)
        second = examples.second[part] if examples.second is not None else None
        for row, kind, longer in _encode(examples.first[part], second, tokenizer, max_length):
            ids.append(row or [nothing])
            kinds.append(kind if row else [0])
            cut += longer
    return ids, kinds, cut


def _encode(
    first: list[str], second: list[str] | None, tokenizer: Any, max_length: int
) -> list[tuple[list[int], list[int], bool]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        found = tokenizer(
            first, second, truncation="longest_first", max_length=max_length,
            return_token_type_ids=True, return_overflowing_tokens=False, verbose=False,
        )  # fmt: skip
        # A tokenizer in Python does not say what it cut.
        return [
            (ids, kinds, len(ids) == max_length)
            for ids, kinds in zip(found["input_ids"], found["token_type_ids"], strict=True)
        ]
    backend.no_padding()
    backend.enable_truncation(max_length)
    texts = first if second is None else list(zip(first, second, strict=True))
    rows = [(e.ids, e.type_ids, bool(e.overflowing)) for e in backend.encode_batch_fast(texts)]
    backend.no_truncation()
    return rows


def words_in(
    folder: Path, arguments: ClassificationArguments, load: Callable[[], LabelledSplits]
) -> Any:
    """Return the vocabulary of words in ``folder``; the first process that finds none makes it.

    Raises:
        DataError: there is none, and no training example to make it of.
    """

    def make(temporary: Path) -> None:
        examples = load().get("train")
        if examples is None:
            raise DataError(
                f"there are no training examples to make a vocabulary of, and {folder} has none: "
                "give --train_file or --tokenizer_name"
            )
        save_generic(
            word_tokenizer([*examples.first, *(examples.second or [])], arguments.vocab_size),
            temporary,
        )

    return once(folder, lambda: install(folder, make))


def word_tokenizer(texts: Iterable[str], vocab_size: int | None = None) -> Any:
    """Make a vocabulary of the words of ``texts``, the most frequent first.

    Words are runs of letters and digits, or of other characters. Ids are ``<pad>`` 0, ``<unk>`` 1,
    ``<sep>`` 2 between the sentences of a pair, then the words; there is nothing around a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=WORDS.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if vocab_size is not None and vocab_size <= len(WORDS.first):
        raise UsageError(
            f"--vocab_size {vocab_size} leaves no room for a word: {len(WORDS.first)} entries are "
            f"{', '.join(WORDS.first)}"
        )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size or 2**31 - 1, special_tokens=list(WORDS.first), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [("<sep>", tokenizer.token_to_id("<sep>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=WORDS.single, pair=WORDS.pair, special_tokens=ids
    )
    return wrap(tokenizer, WORDS, "bert")
