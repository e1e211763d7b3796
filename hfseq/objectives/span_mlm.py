"""T5's span corruption objective (Raffel et al., 2020, section 3.1.4)."""

from __future__ import annotations

import logging
from itertools import count, takewhile
from typing import TYPE_CHECKING

import numpy as np

from hfseq.data.arguments import SpanArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.data.tokenizers import fit_vocabulary, pad_token_id
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays
from hfseq.objectives.seq2seq import Seq2SeqLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
SENTINELS = 100


class SpanMaskedLM(Seq2SeqLM):
    """Replaces spans by sentinels. The decoder generates each sentinel followed by its span.

    A row is one sequence of text, with ``</s>`` between documents. Before spans are replaced, rows
    are longer than ``--max_seq_length``. Afterwards, the inputs of the encoder have exactly this
    length.
    """

    name = "span_mlm"
    data_arguments = SpanArguments
    default_model_type = "t5"

    arguments: SpanArguments

    def setup(self) -> None:
        """Looks up the sentinels."""
        super().setup()
        self.sentinels = sentinel_ids(self.tokenizer)
        self.pad_id = pad_token_id(self.tokenizer)
        if self.tokenizer.eos_token_id is None:
            raise UsageError("span corruption requires a tokenizer with an eos_token")
        self.noise_settings = (
            self.arguments.mlm_probability,
            self.arguments.mean_noise_span_length,
        )

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Adds T5's 100 sentinels to a tokenizer without sentinels, if the model is new.

        The vocabulary of a new model is extended to include them.
        """
        super().configure(config, tokenizer, from_scratch)
        if not len(sentinel_ids(tokenizer)) and from_scratch:
            # This order gives <extra_id_0> the last ID, as in T5.
            names = [f"<extra_id_{k}>" for k in reversed(range(SENTINELS))]
            tokenizer.add_special_tokens({"additional_special_tokens": names})
            logger.info("added %d sentinels (<extra_id_0>, ...) to the tokenizer", SENTINELS)
        if from_scratch:
            fit_vocabulary(tokenizer, config)

    @property
    def cross_documents(self) -> bool:
        """Always ``True``, because a row is one sequence."""
        return True

    def row_length(self, length: int) -> int:
        """Returns the number of tokens of text per row, before spans are replaced by sentinels.

        Args:
            length: Length of the encoder inputs in tokens.
        """
        num_tokens, _ = compute_input_and_target_lengths(length, *self.noise_settings)
        # For spans of one token, T5's formula returns one token too many.
        while corrupted_lengths(num_tokens, *self.noise_settings)[0] > length:
            num_tokens -= 1
        if num_tokens < 2 or length < 4:
            raise UsageError(f"--max_seq_length {length} is too short for a span. Use at least 4.")
        num_spans = int(count_spans(num_tokens, *self.noise_settings)[1])
        if num_spans > len(self.sentinels):
            raise UsageError(
                f"rows of {num_tokens} tokens have {num_spans} masked spans, but the tokenizer has "
                f"{len(self.sentinels)} sentinels (<extra_id_0>, ...). Lower --max_seq_length or "
                "--mlm_probability, raise --mean_noise_span_length, or train a tokenizer with more "
                "sentinels."
            )
        return num_tokens

    def target_length(self, length: int) -> int:
        """Returns the number of target tokens: sentinels, spans and ``</s>``."""
        return corrupted_lengths(self.row_length(length), *self.noise_settings)[1]

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Replaces random spans of the rows by sentinels and returns the arrays of the batch."""
        ids, real = rows["input_ids"], rows["segment_ids"] > 0
        hidden, first = noise_mask(real.sum(axis=1), ids.shape[1], random, *self.noise_settings)
        inputs, tokens, labels = corrupt(
            ids,
            real,
            hidden,
            first,
            self.sentinels,
            self.tokenizer.eos_token_id,
            corrupted_lengths(ids.shape[1], *self.noise_settings),
            self.pad_id,
        )
        batch = {"input_ids": inputs, "segment_ids": tokens.astype(np.int32)}
        return batch | self.decoder_arrays(rows, labels, self.pad_id)


def compute_input_and_target_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
    """Computes the length of text for which span corruption results in a given input length.

    The lengths of inputs and targets include EOS. With a density of 0.5, the text is shortened by
    one token if the targets would otherwise be longer than the inputs.

    Args:
        inputs_length: Length of the encoder inputs in tokens.
        noise_density: Fraction of the tokens to mask.
        mean_noise_span_length: Mean length of the masked spans in tokens.

    Returns:
        The length of the text before corruption, and the length of the targets, in tokens.
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
    """Returns the number of masked tokens and the number of spans of each row.

    At least one token is masked and at least one token is not masked. In rows of a single token,
    nothing is masked.

    Args:
        lengths: Number of tokens of each row.
        density: Fraction of the tokens to mask.
        mean_length: Mean length of the spans in tokens.
    """
    lengths = np.asarray(lengths, np.int64)
    noise = np.clip(np.rint(lengths * density).astype(np.int64), 1, np.maximum(lengths - 1, 1))
    fewest = np.minimum(noise, lengths - noise)
    spans = np.maximum(1, np.rint(fewest / mean_length).astype(np.int64))
    return np.where(lengths > 1, noise, 0), np.where(lengths > 1, spans, 0)


def corrupted_lengths(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Returns the lengths of inputs and targets for a row of ``length`` tokens, including EOS."""
    noise, spans = (int(count) for count in count_spans(length, density, mean_length))
    return length - noise + spans + 1, noise + spans + 1


def noise_mask(
    lengths: np.ndarray, width: int, random: RowRandom, density: float, mean_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the masked spans of each row.

    The numbers of masked tokens and spans depend only on the length of a row. Each span has at
    least one token, and there is at least one token between two spans. All such arrangements are
    equally likely. A span may be at the beginning or end of the row, whereas in T5's code, rows
    always begin with text and end with a span.

    Args:
        lengths: Number of tokens of each row, `(rows,)`.
        width: Number of columns.
        random: Source of random numbers.
        density: Fraction of the tokens to mask.
        mean_length: Mean length of the spans in tokens.

    Returns:
        Two arrays, bool `(rows, width)`. The first is true for masked tokens, the second is true
        for the first token of each span.
    """
    lengths = np.asarray(lengths, np.int64)
    noise, spans = count_spans(lengths, density, mean_length)
    # Divide the masked tokens into spans: a span ends after `spans - 1` randomly chosen masked
    # tokens and after the last masked token.
    ends = choose_positions(random, width + 1, noise - 1, spans - 1)
    rows = np.flatnonzero(noise)
    ends[rows, noise[rows] - 1] = True
    # Put each span into a different gap between (or around) the tokens that are not masked.
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
    random: RowRandom, width: int, limits: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Chooses columns of each row uniformly at random.

    Args:
        random: Source of random numbers.
        width: Number of columns.
        limits: Only the first ``limits`` columns of each row can be chosen, `(rows,)`.
        count: Number of columns to choose in each row, `(rows,)`.

    Returns:
        True for the chosen columns, bool `(rows, width)`.
    """
    keys = random.integers(2**31 - 1, width).astype(np.int64) * width + np.arange(width)
    keys[np.arange(width) >= limits[:, None]] = np.iinfo(np.int64).max
    order = np.sort(keys, axis=1)
    count = np.clip(np.minimum(count, limits), 0, width)
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
    """Replaces spans by sentinels and builds the targets, which contain the spans.

    Args:
        ids: Token IDs, `(rows, length)`.
        real: True for tokens that are not padding, bool `(rows, length)`.
        hidden: True for masked tokens, bool `(rows, length)`.
        first: True for the first token of each span, bool `(rows, length)`.
        sentinels: ``sentinels[k]`` is the ID for the k-th span.
        eos: ID of the EOS token, which is appended to inputs and targets.
        widths: Widths of inputs and targets.
        pad: ID of the padding token.

    Returns:
        The inputs, int32 `(rows, widths[0])`, a mask that is true for inputs that are not padding,
        bool `(rows, widths[0])`, and the targets, int32 `(rows, widths[1])`, padded with -100.
    """
    rows = len(ids)
    sentinel_ids = sentinels[
        np.minimum(np.maximum(np.cumsum(first, axis=1) - 1, 0), len(sentinels) - 1)
    ]
    end = np.full((rows, 1), eos, np.int32)
    has_end = real.any(axis=1, keepdims=True)
    is_kept = np.concatenate([real & (~hidden | first), has_end], axis=1)
    inputs, tokens = _pack(
        np.concatenate([np.where(first, sentinel_ids, ids), end], 1), is_kept, widths[0]
    )
    pairs = np.stack([sentinel_ids, ids], axis=-1).reshape(rows, -1)
    is_target = np.stack([first, hidden], axis=-1).reshape(rows, -1)
    has_end = hidden.any(axis=1, keepdims=True)
    targets, has_target = _pack(
        np.concatenate([pairs, end], 1), np.concatenate([is_target, has_end], 1), widths[1]
    )
    return (
        np.where(tokens, inputs, np.int32(pad)),
        tokens,
        np.where(has_target, targets, IGNORE_INDEX),
    )


def _pack(values: np.ndarray, is_kept: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Moves the selected values of each row to its beginning.

    Args:
        values: The values, `(rows, columns)`.
        is_kept: True for the values to select, bool `(rows, columns)`.
        width: Number of columns of the result.

    Returns:
        The values, int32 `(rows, width)`, and a mask that is true for filled positions, bool
        `(rows, width)`.
    """
    has_value = np.arange(width) < is_kept.sum(axis=1)[:, None]
    packed = np.zeros((len(values), width), np.int32)
    packed[has_value] = values[is_kept]
    return packed, has_value


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns the IDs of ``<extra_id_0>``, ``<extra_id_1>`` and so on, int32 `(sentinels,)`.

    The array is empty if the tokenizer has no sentinels.
    """
    vocabulary = tokenizer.get_vocab()
    ids = (vocabulary.get(f"<extra_id_{number}>") for number in count())
    return np.array(list(takewhile(lambda i: i is not None, ids)), np.int32)
