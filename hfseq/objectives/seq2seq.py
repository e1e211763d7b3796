"""What the objectives of encoder-decoders share: the loss on labels, and where decoders start."""

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
    """Targets are texts: ``--label_smoothing_factor`` smoothes their loss, in training only."""

    sums: ClassVar[tuple[str, ...]] = ("correct", "cross_entropy")

    arguments: Any

    def smoothed(
        self,
        logits: jax.Array,
        labels: jax.Array,
        vocab_size: int | None,
        train: bool,
        extra: Params,
    ) -> Loss:
        """Sum the loss, smoothed in training only, and the cross-entropy in any case."""
        smoothing = self.arguments.label_smoothing_factor if train else 0.0
        total, plain, count, right = smoothed_cross_entropy(logits, labels, vocab_size, smoothing)
        totals = {"correct": right, "cross_entropy": jax.lax.stop_gradient(plain)}
        return total, count, {"extra": extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Loss as it is optimised; cross-entropy, perplexity and accuracy without smoothing."""
        return add_cross_entropy(super().metrics(totals), totals)

    def tokens(self, rows: Arrays) -> int:
        """Return how many tokens are to be written."""
        return int((rows["labels"] != IGNORE_INDEX)[rows["valid"]].sum())

    def chosen(self, split: str, places: Sequence[int]) -> list[int]:
        """Return at which of ``places`` texts are written: of validation so many as asked for."""
        most = self.arguments.max_generate_samples
        if split != "validation" or most is None or most >= len(places):
            return list(places)
        return [places[number * len(places) // most] for number in range(most)]


class Seq2SeqLM(Objective):
    """Predict ``labels`` with the decoder from ``decoder_input_ids`` and the encoder's input.

    Batches hold ``input_ids`` and ``segment_ids`` of the encoder, ``decoder_input_ids`` and
    ``labels`` of the decoder, and ``decoder_segment_ids`` where a row has several documents.
    """

    auto_class = "ForSeq2SeqLM"
    row_layout = base.KnownRows()
    sums: ClassVar[tuple[str, ...]] = ("correct",)

    def setup(self) -> None:
        """Refuse references of words."""
        for name in ("train_ref_file", "validation_ref_file"):
            if getattr(self.arguments, name, None):
                raise UsageError(
                    f"--{name} is for whole-word masking (run_mlm_flax.py); the spans of this "
                    "objective are of tokens: drop it"
                )

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, fresh: bool
    ) -> None:
        """Fill in a decoder start that is missing: the padding token, as in T5."""
        if getattr(config, "decoder_start_token_id", None) is not None:
            return
        start = getattr(config, "pad_token_id", None)
        start = tokenizer.pad_token_id if start is None else start
        if start is None:
            raise UsageError(
                "the configuration has no decoder_start_token_id, and neither it nor the tokenizer "
                "has a padding token to start with: set --config_overrides decoder_start_token_id=N"
            )
        logger.warning(
            "the configuration has no decoder_start_token_id: decoders start with %d, the padding "
            "token",
            start,
        )
        config.decoder_start_token_id = start

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the cross-entropy of the labels."""
        logits, changed = self.logits(model, params, batch, rngs, train, extra)
        size = model.vocab_size("decoder_input_ids")
        total, count, right = cross_entropy(logits, batch["labels"], size)
        return total, count, {"extra": changed, "totals": {"correct": right}}

    def logits(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None,
    ) -> tuple[jax.Array, Params]:
        """Run the model on a batch; returns its logits and the new ``extra``."""
        if "decoder_segment_ids" in batch:
            inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
            inputs |= base.attention_inputs(model, batch["decoder_segment_ids"], "decoder_")
        else:  # one sequence a row: padding, at its end, is all that is to be hidden
            inputs = {"attention_mask": batch["segment_ids"]}
        output, changed = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            input_ids=batch["input_ids"],
            decoder_input_ids=batch["decoder_input_ids"],
            **inputs,
        )
        return output.logits, changed

    def decoder_arrays(
        self, rows: Arrays, labels: np.ndarray, pad: int, segments: np.ndarray | None = None
    ) -> Arrays:
        """Return the decoder's inputs and labels of a batch, (rows, length).

        With ``segments`` each document starts as if it were alone. Rows that only fill the batch up
        have no labels, which are changed in place.
        """
        start = self.config.decoder_start_token_id
        decoder = shift_right(labels, pad, start)
        if segments is not None:
            decoder[:, 1:][segments[:, 1:] > segments[:, :-1]] = start
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORE_INDEX
        return {"decoder_input_ids": decoder, "labels": labels}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Noise rows as in training and let the model write what they were, greedily."""
        tokenizer, shown = self.tokenizer, base.sample_rows(rows, count)
        batch = self.collate(shown, RowRandom(0, 0, np.arange(len(shown["input_ids"]))), 1)
        inputs, real = batch["input_ids"], batch["segment_ids"] > 0
        limit = model.max_length()
        most = 2 * base.SAMPLE_LENGTH if limit is None else min(2 * base.SAMPLE_LENGTH, limit - 1)
        made = model.generate(
            inputs,
            attention_mask=real.astype(np.int32),
            params=params,
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
        ).sequences
        # Masks and sentinels are what the task is about: they are shown.
        unseen = {getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        unseen.add(getattr(model.config, "decoder_start_token_id", None))

        def text(ids: np.ndarray) -> str:
            kept = [i for i in np.asarray(ids).tolist() if i not in unseen]
            return str(tokenizer.decode(kept)).strip()

        return [
            (text(row[mask]), text(out)) for row, mask, out in zip(inputs, real, made, strict=True)
        ]
