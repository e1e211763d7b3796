"""What the objectives of encoder-decoders share: the loss on labels, and where decoders start."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import jax

from hfseq.errors import UsageError
from hfseq.objectives.base import Objective, visible
from hfseq.objectives.cross_entropy import cross_entropy

logger = logging.getLogger(__name__)


class Seq2SeqLM(Objective):
    """Predict ``labels`` with the decoder from ``decoder_input_ids`` and the encoder's input.

    Batches hold ``input_ids`` and ``segment_ids`` of the encoder, ``decoder_input_ids`` and
    ``labels`` of the decoder, and ``decoder_segment_ids`` where a row has several documents.
    """

    auto_class = "ForSeq2SeqLM"
    sums: ClassVar[tuple[str, ...]] = ("correct",)

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        super().__init__(arguments, tokenizer, config)
        for name in ("train_ref_file", "validation_ref_file"):
            if getattr(arguments, name, None):
                raise UsageError(
                    f"--{name} is for whole-word masking (run_mlm_flax.py); the spans of this "
                    "objective are of tokens: drop it"
                )

    @classmethod
    def configure(cls, config: Any, tokenizer: Any, fresh: bool) -> None:
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
            "token", start,
        )  # fmt: skip
        config.decoder_start_token_id = start

    def loss(
        self,
        model: Any,
        params: Any,
        batch: dict[str, jax.Array],
        rngs: Any,
        train: bool,
        extra: Any = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Sum the cross-entropy of the labels."""
        logits, changed = self.logits(model, params, batch, rngs, train, extra)
        total, count, right = cross_entropy(logits, batch["labels"], model.config.vocab_size)
        return total, count, {"extra": changed, "totals": {"correct": right}}

    def logits(
        self, model: Any, params: Any, batch: dict[str, jax.Array], rngs: Any, train: bool,
        extra: Any,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """Run the model on a batch; returns its logits and the new ``extra``."""
        if "decoder_segment_ids" in batch:
            inputs = visible(model, batch["segment_ids"])
            inputs |= visible(model, batch["decoder_segment_ids"], "decoder_")
        else:  # one sequence a row: padding, at its end, is all that is to be hidden
            inputs = {"attention_mask": batch["segment_ids"]}
        output, changed = model(
            input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], **inputs,
            params=params, dropout_rng=rngs, train=train,
            extra=model.extra if extra is None else extra,
        )  # fmt: skip
        return output.logits, changed

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Loss, perplexity and accuracy over the targets."""
        return {**super().metrics(totals), "accuracy": totals["correct"] / max(totals["count"], 1)}
