"""Base classes of the encoder-decoder objectives, which compute loss and decoder inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows, shift_right
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, Sample
from hfseq.objectives.cross_entropy import cross_entropy, smoothed_cross_entropy
from hfseq.objectives.metrics import add_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class TextTargetObjective(Objective):
    """Base class of objectives whose targets are texts, with optional label smoothing.

    ``--label_smoothing_factor`` applies to training only.
    """

    sums: ClassVar[tuple[str, ...]] = ("correct", "cross_entropy")

    arguments: Any

    def smoothed_loss(
        self,
        logits: jax.Array,
        labels: jax.Array,
        vocab_size: int | None,
        train: bool,
        extra: Params,
    ) -> Loss:
        """Returns the loss, with label smoothing in training.

        The totals also include the cross-entropy without label smoothing.
        """
        smoothing = self.arguments.label_smoothing_factor if train else 0.0
        total, plain_total, count, correct = smoothed_cross_entropy(
            logits, labels, vocab_size, smoothing
        )
        totals = {"correct": correct, "cross_entropy": jax.lax.stop_gradient(plain_total)}
        return total, count, {"extra": extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the optimized loss, the perplexity, and the cross-entropy if it differs."""
        return add_cross_entropy(super().metrics(totals), totals)

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of target tokens of each row."""
        return (rows["labels"] != IGNORE_INDEX).sum(1) * rows["valid"]

    def select_for_generation(self, split: str, rows: Sequence[int]) -> list[int]:
        """Selects the rows for which texts are generated.

        For validation, at most ``--max_generate_samples`` evenly spaced rows are selected. For
        other splits, all rows are selected.

        Args:
            split: Name of the split.
            rows: All rows of the split that can be selected.
        """
        max_samples = self.arguments.max_generate_samples
        if split != "validation" or max_samples is None or max_samples >= len(rows):
            return list(rows)
        return [rows[number * len(rows) // max_samples] for number in range(max_samples)]


def set_decoder_start(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the decoder start token to the padding token, as in T5, if it is not configured."""
    if getattr(config, "decoder_start_token_id", None) is not None:
        return
    start = getattr(config, "pad_token_id", None)
    start = tokenizer.pad_token_id if start is None else start
    if start is None:
        raise UsageError(
            "the configuration has no decoder_start_token_id, and neither the configuration "
            "nor the tokenizer has a padding token. Set --config_overrides "
            "decoder_start_token_id=N."
        )
    logger.warning(
        "the configuration has no decoder_start_token_id: using %d, the padding token",
        start,
    )
    config.decoder_start_token_id = start


class Seq2SeqLM(Objective):
    """Base class of objectives that predict a text with an encoder-decoder model.

    Batches contain ``input_ids`` and ``segment_ids`` for the encoder, and ``decoder_input_ids`` and
    ``labels`` for the decoder. If a row has several documents, they also contain
    ``decoder_segment_ids``.
    """

    auto_class = "ForSeq2SeqLM"
    row_guarantees = base.RowGuarantees()
    sums: ClassVar[tuple[str, ...]] = ("correct",)

    def setup(self) -> None:
        """Rejects flags for whole-word masking."""
        for name in ("train_ref_file", "validation_ref_file"):
            if getattr(self.arguments, name, None):
                raise UsageError(
                    f"--{name} is for whole-word masking (run_mlm_flax.py). This objective masks "
                    "spans of tokens, so omit the flag."
                )

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets the decoder start token to the padding token, as in T5, if it is not configured."""
        set_decoder_start(config, tokenizer)

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the cross-entropy summed over the labels."""
        logits, new_extra = self.logits(model, params, batch, rngs, train, extra)
        size = model.vocab_size("decoder_input_ids")
        total, count, correct = cross_entropy(logits, batch["labels"], size)
        return total, count, {"extra": new_extra, "totals": {"correct": correct}}

    def logits(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None,
    ) -> tuple[jax.Array, Params]:
        """Runs the model on a batch and returns its logits and the new ``extra``."""
        if "decoder_segment_ids" in batch:
            inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
            inputs |= base.attention_inputs(model, batch["decoder_segment_ids"], "decoder_")
        else:  # one sequence per row: only the padding at its end is masked
            inputs = {"attention_mask": batch["segment_ids"]}
        output, new_extra = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            input_ids=batch["input_ids"],
            decoder_input_ids=batch["decoder_input_ids"],
            **inputs,
        )
        return output.logits, new_extra

    def decoder_arrays(
        self, rows: Arrays, labels: np.ndarray, pad: int, segments: np.ndarray | None = None
    ) -> Arrays:
        """Returns the decoder's inputs and labels of a batch, `(rows, length)`.

        Args:
            rows: The fetched rows. Labels are removed from rows for which "valid" is false.
            labels: The labels. Modified in place.
            pad: ID of the padding token.
            segments: Document numbers. If given, the decoder inputs of each document begin with
                the decoder start token.
        """
        start = self.config.decoder_start_token_id
        decoder_ids = shift_right(labels, pad, start)
        if segments is not None:
            decoder_ids[:, 1:][segments[:, 1:] > segments[:, :-1]] = start
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORE_INDEX
        return {"decoder_input_ids": decoder_ids, "labels": labels}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Adds noise to a few rows as in training, and lets the model restore them.

        The texts are generated with greedy search.
        """
        tokenizer, rows_shown = self.tokenizer, base.sample_rows(rows, count)
        batch = self.collate(
            rows_shown, RowRandom(0, 0, np.arange(len(rows_shown["input_ids"]))), 1
        )
        inputs, real = batch["input_ids"], batch["segment_ids"] > 0
        max_positions = model.max_length()
        max_new_tokens = (
            2 * base.SAMPLE_LENGTH
            if max_positions is None
            else min(2 * base.SAMPLE_LENGTH, max_positions - 1)
        )
        sequences = model.generate(
            inputs,
            attention_mask=real.astype(np.int32),
            params=params,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
        ).sequences
        # Masks and sentinels are part of the task, so they are shown.
        hidden_ids = {getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        hidden_ids.add(getattr(model.config, "decoder_start_token_id", None))

        def text(ids: np.ndarray) -> str:
            visible_ids = [i for i in np.asarray(ids).tolist() if i not in hidden_ids]
            return str(tokenizer.decode(visible_ids)).strip()

        return [
            (text(row[mask]), text(out))
            for row, mask, out in zip(inputs, real, sequences, strict=True)
        ]
