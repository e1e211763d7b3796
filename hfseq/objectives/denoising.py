"""Denoising, BART's objective (Lewis et al., 2019, section 2.2): restore text from noised text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hfseq.data.arguments import DenoisingArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.data.tokenizers import pad_token_id, special_ids, table_size, word_marks
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays
from hfseq.objectives.seq2seq import Seq2SeqLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Denoising(Seq2SeqLM):
    """Shuffled sentences with masks for spans in, the original row out.

    Documents of a packed row keep to themselves, in the encoder, the decoder and between the two,
    unless ``--cross_documents`` makes the row one sequence.
    """

    name = "denoising"
    data_arguments = DenoisingArguments
    default_model_type = "bart"

    arguments: DenoisingArguments

    def setup(self) -> None:
        """Read off the vocabulary what is special, and where sentences end."""
        tokenizer, size = self.tokenizer, self.config.vocab_size
        super().setup()
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "denoising needs a tokenizer with a mask token; this one has none: train one with "
                "scripts/train_tokenizer.py --model_type bart, or set tokenizer.mask_token"
            )
        self.pad = pad_token_id(tokenizer)
        self.special = special_ids(tokenizer, size)
        roles = ("bos", "eos", "pad", "cls", "sep", "mask")
        if tokenizer.unk_token_id not in [getattr(tokenizer, f"{r}_token_id") for r in roles]:
            self.special[tokenizer.unk_token_id] = False  # it stands for text
        self.sentences = build_sentence_tables(tokenizer, size)

    def target_length(self, length: int) -> int:
        """The decoder writes the whole row."""
        return length

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Shuffle and mask; labels are the rows as they were, special tokens included."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        inputs, documents = self.noise(ids, segments, random)
        labels = np.where(segments > 0, ids, np.int32(IGNORE_INDEX))
        batch = {"input_ids": inputs, "segment_ids": documents}
        batch |= self.decoder_arrays(rows, labels, self.pad, segments)
        return batch | ({} if self.cross_documents else {"decoder_segment_ids": segments})

    def noise(
        self, ids: np.ndarray, segments: np.ndarray, random: RowRandom
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shuffle the sentences of each document and replace spans by masks."""
        arguments, real = self.arguments, segments > 0
        ordinary = real & ~self.special[ids]
        columns = permute_sentences(
            real,
            real & ~ordinary,
            segments,
            self.sentences.ends(ids, ordinary),
            random,
            arguments.permute_sentence_ratio,
        )
        return infill(
            np.take_along_axis(ids, columns, axis=1),
            ordinary,
            segments,
            random,
            mask_id=self.tokenizer.mask_token_id,
            pad=self.pad,
            probability=arguments.mlm_probability,
            poisson_lambda=arguments.poisson_lambda,
        )


STOP_CHARACTERS = ".?!…‽؟۔։।॥።፧᙮"
FULL_WIDTH_STOPS = "。．！？｡"
CLOSING_CHARACTERS = "\"'”’»›)]}」』）］〉》\n\r"


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
        stops[:, :-1] &= self.begins[ids[:, 1:]] & ~lower[:, 1:] | self.hard[ids[:, :-1]]
        stops[:, :-1] &= ~self.closers[ids[:, 1:]] & text[:, 1:]
        stops[:, -1] = False
        return stops


def build_sentence_tables(
    tokenizer: PreTrainedTokenizerBase, size: int | None = None
) -> SentenceTables:
    """Read the tables off a vocabulary with byte-level, SentencePiece or WordPiece marks.

    Where it marks no words, any token that is not in lower case may begin a sentence.
    """
    vocabulary = tokenizer.get_vocab()
    special = special_ids(tokenizer)

    def text_of(token: str) -> str:
        if token.startswith("##"):
            return token[2:]
        return str(tokenizer.convert_tokens_to_string([token])).replace("▁", " ")

    texts = {token: text_of(token) for token, i in vocabulary.items() if not special[i]}
    cased = any(text.lstrip()[:1].isupper() for text in texts.values())
    mark, starts = word_marks(vocabulary)
    tables = np.zeros((6, table_size(tokenizer, size)), bool)
    for token, text in texts.items():
        bare = text.strip().rstrip(CLOSING_CHARACTERS)
        marked = token.startswith(starts) if starts else not (mark and token.startswith(mark))
        opens = bool(starts) and marked and "\n" not in text  # a quotation mark after a space
        tables[:, vocabulary[token]] = (
            bare.endswith(tuple(STOP_CHARACTERS + FULL_WIDTH_STOPS)),
            bool(text) and not text.strip(CLOSING_CHARACTERS) and not opens,
            marked,
            bare.endswith(tuple(FULL_WIDTH_STOPS)) or "\n" in text,
            not text.strip(" "),
            cased and text.lstrip()[:1].islower(),
        )
    return SentenceTables(*tables)


def permute_sentences(
    real: np.ndarray,
    fixed: np.ndarray,
    segments: np.ndarray,
    ends: np.ndarray,
    random: RowRandom,
    ratio: float = 1.0,
) -> np.ndarray:
    """Shuffle sentences; returns the columns that rows are to be read from, int64 (rows, length).

    Arrays are (rows, length): ``real`` tokens that are not padding, ``fixed`` ones that keep their
    place (special tokens), ``segments`` document numbers, ``ends`` the last tokens of sentences. Of
    a row's n sentences ceil(n * ratio) change places with each other within their document.
    """
    keys = random.integers(2**31 - 1, real.shape[1])
    order = random.integers(2**31 - 1, real.shape[1])
    begins = np.ones_like(real)
    begins[:, 1:] = ends[:, :-1] | fixed[:, 1:] | fixed[:, :-1]
    begins[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    begins &= real
    row, start = np.nonzero(begins)
    if not len(row):
        return np.broadcast_to(np.arange(real.shape[1]), real.shape)
    number = np.arange(len(row)) - np.searchsorted(row, row)
    # Tokens of each sentence: up to the next one, or to the end of the row's text.
    new_row = np.concatenate([[True], row[1:] != row[:-1]])
    last = np.concatenate([new_row[1:], [True]])
    length = np.where(last, real.sum(axis=1)[row], np.concatenate([start[1:], [0]])) - start
    # In each row the ceil(n * ratio) of its n movable sentences with the lowest keys move.
    still = fixed[row, start]
    moves = ~still
    counts = np.bincount(row, moves, minlength=row[-1] + 1)
    by_key = np.lexsort((np.where(moves, keys[row, number], np.inf), row))
    rank = np.empty(len(row), np.int64)
    rank[by_key] = number
    moves &= rank < np.ceil(counts * ratio - 1e-9)[row]
    # Sentences do not pass a token that keeps its place, nor the border of a document or a row.
    document = segments[row, start]
    new_group = new_row | still
    new_group[1:] |= still[:-1] | (document[1:] != document[:-1])
    group = np.cumsum(new_group)[moves]
    content = np.arange(len(row))
    chosen = content[moves]
    content[moves] = chosen[np.lexsort((order[row, number][moves], group))]
    # Sentences are laid end to end; padding is read from where it is.
    length, start = length[content], start[content]
    offset = np.cumsum(length) - length
    columns = np.broadcast_to(np.arange(real.shape[1]), real.shape).copy()
    columns[real] = np.repeat(start - offset, length) + np.arange(length.sum())
    return columns


def infill(
    ids: np.ndarray,
    ordinary: np.ndarray,
    segments: np.ndarray,
    random: RowRandom,
    *,
    mask_id: int,
    pad: int,
    probability: float = 0.3,
    poisson_lambda: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace spans by masks; returns ids and segment ids, int32 (rows, length), text to the left.

    ``ordinary`` (rows, length) marks the tokens that may be hidden. Lengths are drawn until they
    hold the row's share of tokens, and the sum that comes closest to it counts. Spans lie anywhere,
    with at least one token between two of them; one that meets a special token becomes two. Rows
    never grow: masks are inserted as long as they are no more than the tokens that went.
    """
    count = ordinary.sum(axis=1)
    spans = _draw_spans(count, random, probability, poisson_lambda, ids.shape[1])
    hidden, first, inserted = _place(*spans, ordinary)
    room = hidden.sum(axis=1) - first.sum(axis=1)
    inserted = np.diff(np.minimum(np.cumsum(inserted, axis=1), room[:, None]), axis=1, prepend=0)
    real = segments > 0
    emitted = np.where(real & (~hidden | first), 1, 0) + inserted[:, :-1]
    # What is inserted behind the last ordinary token (else column 0) stands after it.
    last = np.where(ordinary, np.arange(ordinary.shape[1]), 0).max(axis=1)
    emitted[np.arange(len(ids)), last] += inserted[:, -1]
    place = np.cumsum(emitted, axis=1) - 1
    place[np.arange(len(ids)), last] -= inserted[:, -1]
    filled = np.arange(ids.shape[1]) < emitted.sum(axis=1)[:, None]
    result = np.where(filled, np.int32(mask_id), np.int32(pad))
    kept = real & ~hidden
    result[np.nonzero(kept)[0], place[kept]] = ids[kept]
    documents = np.zeros_like(segments)
    documents[filled] = np.repeat(segments.ravel(), emitted.ravel())
    return result, documents


def _draw_spans(
    count: np.ndarray, random: RowRandom, probability: float, mean: float, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the spans of rows with ``count`` ordinary tokens: the row, start and length of each.

    Starts are numbers among the ordinary tokens: distinct gaps between those that stay. Where there
    are more spans than gaps, some share one.
    """
    budget = np.ceil(count * probability - 1e-9).astype(np.int64)
    most = math.ceil(width * probability)
    draws = math.ceil((most + 8 * math.sqrt(most) + 40) / mean)  # enough, but for one in 10**12
    # P(length <= k), up to where it is one.
    last = math.ceil(mean + 12 * math.sqrt(mean) + 12)
    poisson = [-mean + k * math.log(mean) - math.lgamma(k + 1) for k in range(last)]
    distribution = np.cumsum(np.exp(poisson))
    lengths = np.searchsorted(distribution, random.uniform(draws), side="right")
    sums = np.cumsum(lengths, axis=1)
    used = np.argmin(np.abs(sums - budget[:, None]), axis=1) + 1
    too_long = np.take_along_axis(sums, used[:, None] - 1, axis=1)[:, 0] >= count
    too_long |= budget == count
    # A text that the spans would hide whole: hide the budget in one span.
    lengths[too_long, 0] = budget[too_long]
    used[too_long] = 1
    used = np.where(budget > 0, used, 0)
    in_use = np.arange(draws) < used[:, None]
    lengths = np.where(in_use, lengths, 0)
    gaps = count - lengths.sum(axis=1) + 1
    slots = np.arange(max(width + 1, draws))
    keys = random.uniform(len(slots)).astype(np.float64)
    keys[slots >= np.maximum(gaps, used)[:, None]] = np.inf
    chosen = np.argsort(keys, axis=1, kind="stable")[:, :draws] % gaps[:, None]
    chosen = np.sort(np.where(in_use, chosen, len(slots)), axis=1)
    starts = chosen + np.cumsum(lengths, axis=1) - lengths
    return np.nonzero(in_use)[0], starts[in_use], lengths[in_use]


def _place(
    row: np.ndarray, start: np.ndarray, length: np.ndarray, ordinary: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From numbers among the ordinary tokens to columns.

    Returns hidden and first, bool (rows, length), and how many masks are inserted before each
    column, int64 (rows, length + 1); the last column stands for the end of the text.
    """
    rows, width = ordinary.shape
    steps, heads, added = np.zeros((3, rows, width + 1), np.int64)
    real = length > 0
    np.add.at(steps, (row[real], start[real]), 1)
    np.add.at(steps, (row[real], start[real] + length[real]), -1)
    heads[row[real], start[real]] = 1
    np.add.at(added, (row[~real], start[~real]), 1)
    number = np.cumsum(ordinary, axis=1) - 1
    masked = np.cumsum(steps, axis=1) > 0
    at = np.maximum(number, 0)
    hidden = ordinary & np.take_along_axis(masked, at, axis=1)
    first = ordinary & (np.take_along_axis(heads, at, axis=1) > 0)
    first[:, 1:] |= hidden[:, 1:] & ~ordinary[:, :-1]
    inserted = np.where(ordinary, np.take_along_axis(added, at, axis=1), 0)
    end = np.take_along_axis(added, ordinary.sum(axis=1, keepdims=True), axis=1)
    return hidden, first, np.concatenate([inserted, end], axis=1)
