"""Span-masked language modelling, T5's objective (Raffel et al., 2020, section 3.1.4)."""

from __future__ import annotations

import logging
from itertools import count, takewhile
from typing import TYPE_CHECKING

import numpy as np

from hfseq.data.arguments import SpanArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays
from hfseq.objectives.seq2seq import Seq2SeqLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
SENTINELS = 100


class SpanMaskedLM(Seq2SeqLM):
    """Name the hidden spans by sentinels; the decoder says what each sentinel stands for.

    A row is one sequence of text, with ``</s>`` between documents. Rows of text are longer than
    ``--max_seq_length``, just so that the encoder's input has that many tokens.
    """

    name = "span_mlm"
    data_arguments = SpanArguments
    default_model_type = "t5"

    arguments: SpanArguments

    def setup(self) -> None:
        """Find the sentinels."""
        super().setup()
        self.sentinels = sentinel_ids(self.tokenizer)
        self.pad = pad_token_id(self.tokenizer)
        if self.tokenizer.eos_token_id is None:
            raise UsageError("span corruption needs a tokenizer with an eos_token; this has none")
        self.noise = (self.arguments.mlm_probability, self.arguments.mean_noise_span_length)

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, fresh: bool
    ) -> None:
        """Give a tokenizer without sentinels T5's hundred, and a fresh model room for them."""
        super().configure(config, tokenizer, fresh)
        if not len(sentinel_ids(tokenizer)) and fresh:
            # In this order <extra_id_0> gets the last id, as in T5.
            names = [f"<extra_id_{k}>" for k in reversed(range(SENTINELS))]
            tokenizer.add_special_tokens({"additional_special_tokens": names})
            logger.info("the tokenizer got %d sentinels, <extra_id_0> and so on", SENTINELS)
        needed = max(tokenizer.get_vocab().values()) + 1
        if fresh and config.vocab_size < needed:
            logger.info("vocab_size is %d now, for the tokenizer's sentinels", needed)
            config.vocab_size = needed

    @property
    def cross_documents(self) -> bool:
        """A row is one sequence."""
        return True

    def row_length(self, length: int) -> int:
        """Tokens of text that make encoder inputs of ``length`` tokens."""
        raw, _ = compute_input_and_target_lengths(length, *self.noise)
        # T5's formula is one too long for spans of one token.
        while corrupted_lengths(raw, *self.noise)[0] > length:
            raw -= 1
        if raw < 2 or length < 4:
            raise UsageError(f"--max_seq_length {length} leaves no room for a span: give 4 or more")
        needed = int(count_spans(raw, *self.noise)[1])
        if needed > len(self.sentinels):
            raise UsageError(
                f"rows of {raw} tokens have {needed} hidden spans, and the tokenizer has "
                f"{len(self.sentinels)} sentinels (<extra_id_0> and so on) to name them: give a "
                "smaller --max_seq_length or --mlm_probability or a greater "
                "--mean_noise_span_length, or train a tokenizer with more sentinels"
            )
        return raw

    def target_length(self, length: int) -> int:
        """The sentinels, what they stand for, and ``</s>``."""
        return corrupted_lengths(self.row_length(length), *self.noise)[1]

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Corrupt the rows; every row of a batch has the same widths, shorter ones are padded."""
        ids, real = rows["input_ids"], rows["segment_ids"] > 0
        hidden, first = noise_mask(real.sum(axis=1), ids.shape[1], random, *self.noise)
        inputs, tokens, labels = corrupt(
            ids,
            real,
            hidden,
            first,
            self.sentinels,
            self.tokenizer.eos_token_id,
            corrupted_lengths(ids.shape[1], *self.noise),
            self.pad,
        )
        batch = {"input_ids": inputs, "segment_ids": tokens.astype(np.int32)}
        return batch | self.decoder_arrays(rows, labels, self.pad)


def compute_input_and_target_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
    """Return how long raw text may be so that its corrupted form has ``inputs_length`` tokens.

    Returns (tokens of raw text, tokens of the targets); both counts of the corrupted form include
    the end-of-sequence token. With a density of one half, where targets would come out longer than
    inputs, one token less is taken.
    """

    def corrupted(length: int) -> tuple[int, int]:
        noise = round(length * noise_density)
        spans = round(noise / mean_noise_span_length)
        return length - noise + spans + 1, noise + spans + 1

    length = inputs_length
    while corrupted(length + 1)[0] <= inputs_length:
        length += 1
    inputs, targets = corrupted(length)
    if noise_density == 0.5 and targets > inputs:
        return length - 1, targets - 1
    return length, targets


def count_spans(
    lengths: np.ndarray | int, density: float, mean_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens of rows of ``lengths`` are hidden, and in how many spans.

    At least one is hidden and one stays; a row of a single token is left as it is.
    """
    lengths = np.asarray(lengths, np.int64)
    noise = np.clip(np.rint(lengths * density).astype(np.int64), 1, np.maximum(lengths - 1, 1))
    fewest = np.minimum(noise, lengths - noise)
    spans = np.maximum(1, np.rint(fewest / mean_length).astype(np.int64))
    return np.where(lengths > 1, noise, 0), np.where(lengths > 1, spans, 0)


def corrupted_lengths(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Return how many inputs and targets a row of ``length`` tokens becomes, ends included."""
    noise, spans = (int(count) for count in count_spans(length, density, mean_length))
    return length - noise + spans + 1, noise + spans + 1


def noise_mask(
    lengths: np.ndarray, width: int, random: RowRandom, density: float, mean_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the spans of rows of ``lengths`` tokens; returns (hidden, first), bool (rows, width).

    Every arrangement of the row's number of spans, each of at least one token and at least one
    token apart, is equally likely: a span may begin the row or end it. (T5's code begins with text
    and ends with a span, always.)
    """
    lengths = np.asarray(lengths, np.int64)
    noise, spans = count_spans(lengths, density, mean_length)
    # The hidden tokens are cut into spans after `spans - 1` of them and after the last one ...
    ends = choose_positions(random, width + 1, noise - 1, spans - 1)
    rows = np.flatnonzero(noise)
    ends[rows, noise[rows] - 1] = True
    # ... and each span lies in a gap of its own between (or around) the tokens that stay.
    row, gap = np.nonzero(choose_positions(random, width + 1, lengths - noise + 1, spans))
    end = np.nonzero(ends)[1] + 1
    new_row = np.concatenate([[True], row[1:] != row[:-1]])[: len(row)]
    begin = np.where(new_row, 0, np.concatenate([[0], end])[: len(row)])
    steps = np.zeros((len(lengths), width + 1), np.int32)
    first = np.zeros((len(lengths), width), bool)
    steps[row, gap + begin] += 1
    first[row, gap + begin] = True
    steps[row, gap + end] -= 1
    return np.cumsum(steps[:, :width], axis=1) > 0, first


def choose_positions(
    random: RowRandom, width: int, among: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Choose ``count`` of the first ``among`` columns of each row, all choices equally likely."""
    keys = random.integers(2**31 - 1, width).astype(np.int64) * width + np.arange(width)
    keys[np.arange(width) >= among[:, None]] = np.iinfo(np.int64).max
    order = np.sort(keys, axis=1)
    count = np.clip(np.minimum(count, among), 0, width)
    last = np.take_along_axis(order, np.maximum(count - 1, 0)[:, None], axis=1)
    return (keys <= last) & (count > 0)[:, None]


def corrupt(
    ids: np.ndarray,
    real: np.ndarray,
    hidden: np.ndarray,
    first: np.ndarray,
    sentinels: np.ndarray,
    eos: int,
    widths: tuple[int, int],
    pad: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replace the spans by sentinels; returns inputs, which of them are tokens, and targets.

    ``ids`` and the masks are (rows, length); ``sentinels[k]`` is the id of the k-th span. Inputs
    are int32 (rows, widths[0]), filled up with ``pad``; targets int32 (rows, widths[1]), filled up
    with -100. Both end with ``eos``.
    """
    rows = len(ids)
    names = sentinels[np.minimum(np.maximum(np.cumsum(first, axis=1) - 1, 0), len(sentinels) - 1)]
    end = np.full((rows, 1), eos, np.int32)
    closed = real.any(axis=1, keepdims=True)
    kept = np.concatenate([real & (~hidden | first), closed], axis=1)
    inputs, tokens = _pack(np.concatenate([np.where(first, names, ids), end], 1), kept, widths[0])
    pairs = np.stack([names, ids], axis=-1).reshape(rows, -1)
    shown = np.stack([first, hidden], axis=-1).reshape(rows, -1)
    closed = hidden.any(axis=1, keepdims=True)
    targets, wanted = _pack(
        np.concatenate([pairs, end], 1), np.concatenate([shown, closed], 1), widths[1]
    )
    return np.where(tokens, inputs, np.int32(pad)), tokens, np.where(wanted, targets, IGNORE_INDEX)


def _pack(values: np.ndarray, kept: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Move the kept values of each row to its beginning; also says which places hold one."""
    filled = np.arange(width) < kept.sum(axis=1)[:, None]
    packed = np.zeros((len(values), width), np.int32)
    packed[filled] = values[kept]
    return packed, filled


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the ids of ``<extra_id_0>``, ``<extra_id_1>`` … by name, int32; empty if none."""
    vocabulary = tokenizer.get_vocab()
    ids = (vocabulary.get(f"<extra_id_{number}>") for number in count())
    return np.array(list(takewhile(lambda i: i is not None, ids)), np.int32)
