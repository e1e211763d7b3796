"""BART's denoising objective (Lewis et al., 2019, section 2.2): restores text with added noise."""

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
    """Restores text in which sentences are shuffled and spans are replaced by mask tokens.

    The documents of a packed row do not attend to each other in the encoder, the decoder and
    cross-attention, unless ``--cross_documents`` treats the row as one sequence.
    """

    name = "denoising"
    data_arguments = DenoisingArguments
    default_model_type = "bart"

    arguments: DenoisingArguments

    def setup(self) -> None:
        """Looks up special tokens and sentence boundaries in the vocabulary."""
        tokenizer, vocab_size = self.tokenizer, self.config.vocab_size
        super().setup()
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "denoising requires a tokenizer with a mask token. Train one with "
                "scripts/train_tokenizer.py --model_type bart, or set tokenizer.mask_token."
            )
        self.pad_id = pad_token_id(tokenizer)
        self.is_special = special_ids(tokenizer, vocab_size)
        roles = ("bos", "eos", "pad", "cls", "sep", "mask")
        if tokenizer.unk_token_id not in [getattr(tokenizer, f"{r}_token_id") for r in roles]:
            self.is_special[tokenizer.unk_token_id] = False  # unknown tokens are part of the text
        self.sentence_tables = build_sentence_tables(tokenizer, vocab_size)

    def target_length(self, length: int) -> int:
        """Returns ``length``, because the decoder generates the whole row."""
        return length

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Shuffles and masks the inputs. Labels are the original rows, including special tokens."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        inputs, noised_segments = self.noise(ids, segments, random)
        labels = np.where(segments > 0, ids, np.int32(IGNORE_INDEX))
        batch = {"input_ids": inputs, "segment_ids": noised_segments}
        batch |= self.decoder_arrays(rows, labels, self.pad_id, segments)
        return batch | ({} if self.cross_documents else {"decoder_segment_ids": segments})

    def noise(
        self, ids: np.ndarray, segments: np.ndarray, random: RowRandom
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shuffles the sentences of each document and replaces spans by mask tokens.

        Args:
            ids: Token IDs, `(rows, length)`.
            segments: Document number of each token, 0 for padding, `(rows, length)`.
            random: Source of random numbers.

        Returns:
            Token IDs and document numbers of the noised rows, int32 `(rows, length)`.
        """
        arguments, real = self.arguments, segments > 0
        ordinary = real & ~self.is_special[ids]
        columns = permute_sentences(
            real,
            real & ~ordinary,
            segments,
            self.sentence_tables.sentence_ends(ids, ordinary),
            random,
            arguments.permute_sentence_ratio,
        )
        return infill(
            np.take_along_axis(ids, columns, axis=1),
            ordinary,
            segments,
            random,
            mask_id=self.tokenizer.mask_token_id,
            pad=self.pad_id,
            probability=arguments.mlm_probability,
            poisson_lambda=arguments.poisson_lambda,
        )


STOP_CHARACTERS = ".?!…‽؟۔։।॥።፧᙮"
FULL_WIDTH_STOPS = "。．！？｡"
CLOSING_CHARACTERS = "\"'”’»›)]}」』）］〉》\n\r"


@dataclass(frozen=True)
class SentenceTables:
    """Properties of each token ID that determine where sentences end, bool arrays `(vocab_size,)`.

    Attributes:
        stops: The token ends with a full stop or a similar character.
        closers: The token consists of characters that may follow a stop, such as quotation marks.
        begins: The token may begin a new sentence if it follows a stop.
        hard: The token ends a sentence even without a following space.
        spaces: The token is a space.
        lower: The token begins with a lower-case letter. False for uncased vocabularies.
    """

    stops: np.ndarray
    closers: np.ndarray
    begins: np.ndarray
    hard: np.ndarray
    spaces: np.ndarray
    lower: np.ndarray

    def sentence_ends(self, ids: np.ndarray, text: np.ndarray) -> np.ndarray:
        """Marks the last token of each sentence, except the last token of a document.

        Args:
            ids: Token IDs, int `(rows, length)`.
            text: True for tokens of text and false for padding and special tokens, bool
                `(rows, length)`.
        """
        stops = self.stops[ids] & text
        closers = self.closers[ids] & text
        for _ in range(3):  # up to three tokens of quotation marks, brackets and line breaks
            stops[:, 1:] |= stops[:, :-1] & closers[:, 1:]
        lower = self.lower[ids]
        lower[:, :-1] |= self.spaces[ids[:, :-1]] & lower[:, 1:]
        stops[:, :-1] &= self.begins[ids[:, 1:]] & ~lower[:, 1:] | self.hard[ids[:, :-1]]
        stops[:, :-1] &= ~self.closers[ids[:, 1:]] & text[:, 1:]
        stops[:, -1] = False
        return stops


def build_sentence_tables(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> SentenceTables:
    """Builds the `SentenceTables` of a byte-level, SentencePiece or WordPiece vocabulary.

    If the vocabulary does not mark words, any token that is not lower-case may begin a sentence.

    Args:
        tokenizer: The tokenizer.
        vocab_size: Size of the tables, by default the size of the tokenizer's vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    special = special_ids(tokenizer)

    def text_of(token: str) -> str:
        if token.startswith("##"):
            return token[2:]
        return str(tokenizer.convert_tokens_to_string([token])).replace("▁", " ")

    texts = {token: text_of(token) for token, i in vocabulary.items() if not special[i]}
    cased = any(text.lstrip()[:1].isupper() for text in texts.values())
    continuation_mark, word_start_marks = word_marks(vocabulary)
    tables = np.zeros((6, table_size(tokenizer, vocab_size)), bool)
    for token, text in texts.items():
        stripped = text.strip().rstrip(CLOSING_CHARACTERS)
        starts_word = (
            token.startswith(word_start_marks)
            if word_start_marks
            else not (continuation_mark and token.startswith(continuation_mark))
        )
        # An opening quotation mark follows a space.
        is_opening = bool(word_start_marks) and starts_word and "\n" not in text
        tables[:, vocabulary[token]] = (
            stripped.endswith(tuple(STOP_CHARACTERS + FULL_WIDTH_STOPS)),
            bool(text) and not text.strip(CLOSING_CHARACTERS) and not is_opening,
            starts_word,
            stripped.endswith(tuple(FULL_WIDTH_STOPS)) or "\n" in text,
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
    """Shuffles sentences within their documents.

    Of the n sentences in a row, ceil(n * ``ratio``) are selected at random. The selected sentences
    of each document are shuffled among their positions.

    Args:
        real: True for tokens that are not padding, bool `(rows, length)`.
        fixed: True for tokens that keep their position, such as special tokens, bool
            `(rows, length)`.
        segments: Document numbers, `(rows, length)`.
        ends: True for the last token of each sentence, bool `(rows, length)`.
        random: Source of random numbers.
        ratio: Fraction of the sentences to select.

    Returns:
        The column from which each token is taken, int64 `(rows, length)`.
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
    # A sentence ends where the next sentence begins, or at the end of the row's text.
    new_row = np.concatenate([[True], row[1:] != row[:-1]])
    last = np.concatenate([new_row[1:], [True]])
    length = np.where(last, real.sum(axis=1)[row], np.concatenate([start[1:], [0]])) - start
    # Of the n sentences per row that are not fixed, the ceil(n * ratio) sentences with the lowest
    # random numbers move.
    is_fixed = fixed[row, start]
    moves = ~is_fixed
    counts = np.bincount(row, moves, minlength=row[-1] + 1)
    by_key = np.lexsort((np.where(moves, keys[row, number], np.inf), row))
    rank = np.empty(len(row), np.int64)
    rank[by_key] = number
    moves &= rank < np.ceil(counts * ratio - 1e-9)[row]
    # Sentences do not move across fixed tokens or the boundaries of documents and rows.
    document = segments[row, start]
    new_group = new_row | is_fixed
    new_group[1:] |= is_fixed[:-1] | (document[1:] != document[:-1])
    group = np.cumsum(new_group)[moves]
    content = np.arange(len(row))
    movable = content[moves]
    content[moves] = movable[np.lexsort((order[row, number][moves], group))]
    # Concatenate the sentences. Padding keeps its position.
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
    """Replaces each span of tokens by a single mask token (BART's text infilling).

    Span lengths are drawn from a Poisson distribution. Of these lengths, the first ones whose sum
    is closest to the number of tokens to mask are used. Spans are at random positions, with at
    least one token between two spans. A span that contains a special token becomes two spans.

    A span of length 0 inserts a mask token. Rows do not become longer, because mask tokens are
    inserted only as long as their number does not exceed the number of removed tokens.

    Args:
        ids: Token IDs, `(rows, length)`.
        ordinary: True for tokens that may be masked, bool `(rows, length)`.
        segments: Document numbers, `(rows, length)`.
        random: Source of random numbers.
        mask_id: ID of the mask token.
        pad: ID of the padding token.
        probability: Fraction of the ordinary tokens to mask.
        poisson_lambda: Mean span length in tokens.

    Returns:
        Token IDs and document numbers, int32 `(rows, length)`, aligned to the left.
    """
    count = ordinary.sum(axis=1)
    spans = _draw_spans(count, random, probability, poisson_lambda, ids.shape[1])
    hidden, first, inserted = _place(*spans, ordinary)
    max_inserted = hidden.sum(axis=1) - first.sum(axis=1)
    inserted = np.diff(
        np.minimum(np.cumsum(inserted, axis=1), max_inserted[:, None]), axis=1, prepend=0
    )
    real = segments > 0
    emitted = np.where(real & (~hidden | first), 1, 0) + inserted[:, :-1]
    # Masks inserted at the end of the text follow the last ordinary token, or column 0.
    last = np.where(ordinary, np.arange(ordinary.shape[1]), 0).max(axis=1)
    emitted[np.arange(len(ids)), last] += inserted[:, -1]
    target_columns = np.cumsum(emitted, axis=1) - 1
    target_columns[np.arange(len(ids)), last] -= inserted[:, -1]
    has_token = np.arange(ids.shape[1]) < emitted.sum(axis=1)[:, None]
    result = np.where(has_token, np.int32(mask_id), np.int32(pad))
    is_kept = real & ~hidden
    result[np.nonzero(is_kept)[0], target_columns[is_kept]] = ids[is_kept]
    documents = np.zeros_like(segments)
    documents[has_token] = np.repeat(segments.ravel(), emitted.ravel())
    return result, documents


def _draw_spans(
    count: np.ndarray, random: RowRandom, probability: float, mean: float, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws the spans of rows with ``count`` ordinary tokens.

    Each span is placed in a different gap between (or around) the tokens that are not masked. If
    there are more spans than gaps, some spans share a gap.

    Args:
        count: Number of ordinary tokens of each row, `(rows,)`.
        random: Source of random numbers.
        probability: Fraction of the ordinary tokens to mask.
        mean: Mean span length in tokens.
        width: Number of columns.

    Returns:
        The row, start and length of each span, `(spans,)`. The start is an index into the ordinary
        tokens of the row.
    """
    budget = np.ceil(count * probability - 1e-9).astype(np.int64)
    max_hidden = math.ceil(width * probability)
    # With probability 1 - 1e-12, this number of spans is sufficient.
    draws = math.ceil((max_hidden + 8 * math.sqrt(max_hidden) + 40) / mean)
    # P(length <= k) for all k at which it is less than 1.
    max_length = math.ceil(mean + 12 * math.sqrt(mean) + 12)
    poisson = [-mean + k * math.log(mean) - math.lgamma(k + 1) for k in range(max_length)]
    distribution = np.cumsum(np.exp(poisson))
    lengths = np.searchsorted(distribution, random.uniform(draws), side="right")
    sums = np.cumsum(lengths, axis=1)
    num_spans = np.argmin(np.abs(sums - budget[:, None]), axis=1) + 1
    too_long = np.take_along_axis(sums, num_spans[:, None] - 1, axis=1)[:, 0] >= count
    too_long |= budget == count
    # If the spans would cover the whole text, mask the required tokens with a single span.
    lengths[too_long, 0] = budget[too_long]
    num_spans[too_long] = 1
    num_spans = np.where(budget > 0, num_spans, 0)
    in_use = np.arange(draws) < num_spans[:, None]
    lengths = np.where(in_use, lengths, 0)
    gaps = count - lengths.sum(axis=1) + 1
    gap_numbers = np.arange(max(width + 1, draws))
    keys = random.uniform(len(gap_numbers)).astype(np.float64)
    keys[gap_numbers >= np.maximum(gaps, num_spans)[:, None]] = np.inf
    chosen_gaps = np.argsort(keys, axis=1, kind="stable")[:, :draws] % gaps[:, None]
    chosen_gaps = np.sort(np.where(in_use, chosen_gaps, len(gap_numbers)), axis=1)
    starts = chosen_gaps + np.cumsum(lengths, axis=1) - lengths
    return np.nonzero(in_use)[0], starts[in_use], lengths[in_use]


def _place(
    row: np.ndarray, start: np.ndarray, length: np.ndarray, ordinary: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Converts the spans of :func:`_draw_spans` to arrays by column.

    Args:
        row: The row of each span, `(spans,)`.
        start: Index of the first ordinary token of each span, `(spans,)`.
        length: Number of tokens of each span, `(spans,)`.
        ordinary: True for tokens that may be masked, bool `(rows, length)`.

    Returns:
        Three arrays:

        - True for masked tokens, bool `(rows, length)`.
        - True for the first token of each span, bool `(rows, length)`.
        - The number of mask tokens to insert before each column, int64 `(rows, length + 1)`. The
          last column stands for the end of the text.
    """
    rows, width = ordinary.shape
    steps, span_starts, insertions = np.zeros((3, rows, width + 1), np.int64)
    has_length = length > 0
    np.add.at(steps, (row[has_length], start[has_length]), 1)
    np.add.at(steps, (row[has_length], start[has_length] + length[has_length]), -1)
    span_starts[row[has_length], start[has_length]] = 1
    np.add.at(insertions, (row[~has_length], start[~has_length]), 1)
    token_numbers = np.cumsum(ordinary, axis=1) - 1
    in_span = np.cumsum(steps, axis=1) > 0
    clipped_numbers = np.maximum(token_numbers, 0)
    hidden = ordinary & np.take_along_axis(in_span, clipped_numbers, axis=1)
    first = ordinary & (np.take_along_axis(span_starts, clipped_numbers, axis=1) > 0)
    first[:, 1:] |= hidden[:, 1:] & ~ordinary[:, :-1]
    inserted = np.where(ordinary, np.take_along_axis(insertions, clipped_numbers, axis=1), 0)
    insertions_at_end = np.take_along_axis(insertions, ordinary.sum(axis=1, keepdims=True), axis=1)
    return hidden, first, np.concatenate([inserted, insertions_at_end], axis=1)
