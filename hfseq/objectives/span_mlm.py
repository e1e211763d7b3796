"""Span-masked language modelling, T5's objective (Raffel et al., 2020, section 3.1.4)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hfseq.data.tokenization import pad_token_id
from hfseq.errors import UsageError
from hfseq.labels import IGNORED, shift_right
from hfseq.objectives import samples
from hfseq.objectives.seq2seq import Seq2SeqLM
from hfseq.objectives.spans import (
    compute_input_and_target_lengths,
    corrupt,
    corrupted_lengths,
    count_spans,
    noise_mask,
    sentinel_ids,
)

logger = logging.getLogger(__name__)

SENTINELS = 100


class SpanMaskedLM(Seq2SeqLM):
    """Name the hidden spans by sentinels; the decoder says what each sentinel stands for.

    A row is one sequence of text, with ``</s>`` between documents. Rows of text are longer than
    ``--max_seq_length``, just so that the encoder's input has that many tokens.
    """

    name = "span_mlm"
    default_model_type = "t5"

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        super().__init__(arguments, tokenizer, config)
        self.sentinels = sentinel_ids(tokenizer)
        self.pad = pad_token_id(tokenizer)
        if tokenizer.eos_token_id is None:
            raise UsageError("span corruption needs a tokenizer with an eos_token; this has none")
        self.noise = (arguments.mlm_probability, arguments.mean_noise_span_length)

    @classmethod
    def configure(cls, config: Any, tokenizer: Any, fresh: bool) -> None:
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
        while self._widths(raw)[0] > length:  # T5's formula is one too long for spans of one token
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
        return self._widths(self.row_length(length))[1]

    def _widths(self, length: int) -> tuple[int, int]:
        return corrupted_lengths(length, *self.noise)

    def collate(
        self, rows: dict[str, np.ndarray], random: Any, groups: int
    ) -> dict[str, np.ndarray]:
        """Corrupt the rows; every row of a batch has the same widths, shorter ones are padded."""
        ids, real = rows["input_ids"], rows["segment_ids"] > 0
        hidden, first = noise_mask(real.sum(axis=1), ids.shape[1], random, *self.noise)
        inputs, tokens, labels = corrupt(
            ids, real, hidden, first, self.sentinels, self.tokenizer.eos_token_id,
            self._widths(ids.shape[1]), self.pad,
        )  # fmt: skip
        starts = shift_right(labels, self.pad, self.config.decoder_start_token_id)
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORED
        return {
            "input_ids": inputs,
            "segment_ids": tokens.astype(np.int32),
            "decoder_input_ids": starts,
            "labels": labels,
        }

    def samples(self, model: Any, params: Any, rows: Any, count: int) -> list[samples.Sample]:
        """Say what the sentinels stand for."""
        return samples.restored(model, params, self, samples.pick(rows, count))
