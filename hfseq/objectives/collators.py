"""The collator classes of Transformers 4's MLM, T5 and BART scripts, for custom training loops.

The collators take lists of examples and return NumPy arrays. The T5 and BART collators add noise
with the functions of the corresponding objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hfseq.data.batches import IGNORE_INDEX, RowRandom, shift_right
from hfseq.data.tokenizers import special_ids
from hfseq.errors import UsageError
from hfseq.objectives.denoising import (
    SentenceTables,
    build_sentence_tables,
    infill,
    permute_sentences,
)
from hfseq.objectives.span_mlm import (
    corrupt,
    corrupted_lengths,
    count_spans,
    noise_mask,
    sentinel_ids,
)

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


class _NoisingCollator:
    """Base class of the T5 and BART collators.

    The random numbers of a batch depend on the seed and on the number of previous batches.
    """

    seed: int | None
    batches = 0

    def __post_init__(self) -> None:
        random_seed = int(np.random.default_rng().integers(2**31))
        self._seed = random_seed if self.seed is None else self.seed

    def __call__(self, examples: Sequence[dict]) -> BatchEncoding:
        """Adds noise to the "input_ids" of the examples."""
        from transformers import BatchEncoding

        ids = np.array([example["input_ids"] for example in examples], np.int32)
        return BatchEncoding(self._noise(ids))

    def _noise(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _random(self, rows: int) -> RowRandom:
        self.batches += 1
        return RowRandom(self._seed, self.batches, np.arange(rows))


@dataclass
class FlaxDataCollatorForT5MLM(_NoisingCollator):
    """Masks random spans of examples of equal length (span corruption).

    The length of the examples must be the first result of `compute_input_and_target_lengths`. The
    sentinels of the tokenizer must be named `<extra_id_0>`, `<extra_id_1>` and so on. A batch
    contains "input_ids", `(batch, input_length)`, and "labels" and "decoder_input_ids",
    `(batch, target_length)`.

    Raises:
        ValueError: The length of the examples does not result in `input_length` and
            `target_length`, or the examples have more spans than the tokenizer has sentinels.
    """

    tokenizer: PreTrainedTokenizerBase
    noise_density: float
    mean_noise_span_length: float
    input_length: int
    target_length: int
    pad_token_id: int
    decoder_start_token_id: int
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sentinels = sentinel_ids(self.tokenizer)

    def _noise(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        length = ids.shape[1]
        noise = (self.noise_density, self.mean_noise_span_length)
        sizes, spans = corrupted_lengths(length, *noise), int(count_spans(length, *noise)[1])
        if sizes != (self.input_length, self.target_length):
            raise UsageError(
                f"`input_ids` are incorrectly preprocessed: {length} tokens give {sizes[0]} inputs "
                f"and {sizes[1]} targets, not {self.input_length} and {self.target_length}. Use "
                "compute_input_and_target_lengths for the length of the examples"
            )
        if spans > len(self.sentinels):
            raise UsageError(
                f"rows have {spans} spans, but the tokenizer has {len(self.sentinels)} sentinels "
                "(<extra_id_0>, ...). Use shorter examples, or fewer and longer spans"
            )
        hidden, first = self._masks(np.full(len(ids), length))
        inputs, _, labels = corrupt(
            ids,
            np.ones_like(hidden),
            hidden,
            first,
            self.sentinels,
            self.tokenizer.eos_token_id,
            (self.input_length, self.target_length),
            self.pad_token_id,
        )
        decoder = shift_right(labels, self.pad_token_id, self.decoder_start_token_id)
        return {"input_ids": inputs, "labels": labels, "decoder_input_ids": decoder}

    def _masks(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        random, width = self._random(len(lengths)), int(lengths.max())
        return noise_mask(lengths, width, random, self.noise_density, self.mean_noise_span_length)

    def random_spans_noise_mask(self, length: int) -> np.ndarray:
        """Draws the masked tokens of a row. Returns true for masked tokens, bool `(length,)`."""
        return self._masks(np.array([length]))[0][0]


@dataclass
class FlaxDataCollatorForBartDenoisingLM(_NoisingCollator):
    """Shuffles sentences and masks spans of examples of equal length, padded at the end.

    Sentences end at tokens such as full stops. They also end at padding tokens in the middle of a
    row, which the script of Transformers 4 inserts to mark the ends of sentences. A batch contains
    "input_ids", "attention_mask", "labels" (the whole row, with -100 at padding),
    "decoder_input_ids" and "decoder_attention_mask". All arrays have the shape of the examples.

    Raises:
        ValueError: The tokenizer has no mask token or no end-of-sequence token.
    """

    tokenizer: PreTrainedTokenizerBase
    decoder_start_token_id: int
    mask_ratio: float = 0.3
    poisson_lambda: float = 3.0
    permute_sentence_ratio: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token is None or self.tokenizer.eos_token is None:
            raise UsageError(
                "This tokenizer does not have a mask token or eos token which is necessary for "
                "denoising language modeling."
            )
        super().__post_init__()
        self.special = special_ids(self.tokenizer)
        self.sentences: SentenceTables = build_sentence_tables(self.tokenizer)

    def _noise(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        pad = self.tokenizer.pad_token_id
        real = np.flip(np.maximum.accumulate(np.flip(ids != pad, 1), axis=1), 1)
        marks = real & (ids == pad)
        ordinary = real & ~self.special[ids]
        ends = self.sentences.sentence_ends(ids, ordinary) | marks
        fixed = real & ~ordinary & ~marks
        random, rows = self._random(len(ids)), real.astype(np.int32)
        columns = permute_sentences(real, fixed, rows, ends, random, self.permute_sentence_ratio)
        inputs, attention_mask = infill(
            np.take_along_axis(ids, columns, axis=1),
            np.take_along_axis(ordinary, columns, axis=1),
            rows,
            random,
            mask_id=self.tokenizer.mask_token_id,
            pad=pad,
            probability=self.mask_ratio,
            poisson_lambda=self.poisson_lambda,
        )
        labels = np.where(real & ~marks, ids, np.int32(IGNORE_INDEX))
        decoder = shift_right(np.where(real, ids, pad), pad, self.decoder_start_token_id)
        return {
            "input_ids": inputs,
            "attention_mask": attention_mask,
            "labels": labels,
            "decoder_input_ids": decoder,
            "decoder_attention_mask": rows,
        }


@dataclass
class FlaxDataCollatorForLanguageModeling:
    """Pads examples and selects random tokens to predict.

    80 % of the selected tokens are replaced by the mask token and 10 % by a random token. 10 % are
    not changed. Labels are -100 at tokens that are not predicted. Without `mlm`, the labels are
    the inputs, with -100 at padding.

    This class draws random numbers from its own generator. The scripts of hfseq use
    `objectives.mlm` instead, whose masks depend only on the step and the row.

    Raises:
        ValueError: Masking is enabled and the tokenizer has no mask token.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm: bool = True
    mlm_probability: float = 0.15
    seed: int | None = None
    generator: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mlm and self.tokenizer.mask_token is None:
            raise ValueError(
                "This tokenizer does not have a mask token which is necessary for masked language "
                "modeling. You should "
                "pass `mlm=False` to train on causal language modeling instead."
            )
        self.generator = np.random.default_rng(self.seed)

    def __call__(self, examples: Sequence[dict], pad_to_multiple_of: int = 16) -> BatchEncoding:
        """Pads the examples to the same length and returns NumPy arrays, including "labels"."""
        batch = self.tokenizer.pad(
            list(examples), pad_to_multiple_of=pad_to_multiple_of, return_tensors="np"
        )
        special = batch.pop("special_tokens_mask", None)
        if not self.mlm:
            batch["labels"] = np.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
            return batch
        batch["input_ids"], batch["labels"] = self.mask_tokens(batch["input_ids"], special)
        return batch

    def mask_tokens(
        self, inputs: np.ndarray, special_tokens_mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the masked inputs and the labels."""
        if special_tokens_mask is None:
            special_tokens_mask = special_ids(self.tokenizer)[inputs]
        selected = (
            self.generator.random(inputs.shape) < self.mlm_probability
        ) & ~special_tokens_mask.astype(bool)
        draws = self.generator.random(inputs.shape)
        random_ids = self.generator.integers(self.tokenizer.vocab_size, size=inputs.shape)
        masked = np.where(selected & (draws < 0.8), self.tokenizer.mask_token_id, inputs)
        masked = np.where(selected & (draws >= 0.8) & (draws < 0.9), random_ids, masked)
        return masked.astype(inputs.dtype), np.where(selected, inputs, -100)
