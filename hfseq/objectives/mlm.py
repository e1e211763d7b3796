"""Masked language modelling: predict tokens that were hidden (Devlin et al., 2018, section 3.1)."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.tokenizers import special_ids, word_start_table
from hfseq.errors import UsageError
from hfseq.objectives import samples
from hfseq.objectives.base import Objective, visible
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.masking import gather_masked, mask_tokens


class MaskedLM(Objective):
    """Dynamic 80/10/10 masking; the head runs at masked positions only, with the same loss."""

    name = "mlm"
    auto_class = "ForMaskedLM"
    sums = ("correct",)

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        super().__init__(arguments, tokenizer, config)
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "masked language modelling needs a tokenizer with a mask token; this one has none: "
                "train one with scripts/train_tokenizer.py --model_type roberta, or set "
                "tokenizer.mask_token"
            )
        self.special = special_ids(tokenizer, config.vocab_size)
        whole = arguments.whole_word_masking or arguments.train_ref_file
        self.word_starts = word_start_table(tokenizer, config.vocab_size) if whole else None

    def collate(
        self, rows: dict[str, np.ndarray], random: Any, groups: int
    ) -> dict[str, np.ndarray]:
        """Mask the rows; targets are gathered in ``groups`` equal parts, one a data shard."""
        inputs, labels = mask_tokens(
            rows, random, mask_id=self.tokenizer.mask_token_id, vocab_size=len(self.tokenizer),
            special=self.special, probability=self.arguments.mlm_probability,
            word_starts=self.word_starts,
        )  # fmt: skip
        positions, targets = gather_masked(labels, groups, self.arguments.mlm_probability)
        return {
            "input_ids": inputs,
            "segment_ids": rows["segment_ids"],
            "masked_positions": positions,
            "labels": targets,
        }

    def loss(
        self,
        model: Any,
        params: Any,
        batch: dict[str, jax.Array],
        rngs: Any,
        train: bool,
        extra: Any = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Sum the cross-entropy at the masked positions."""
        positions, labels = batch["masked_positions"], batch["labels"]
        inputs = {
            "input_ids": batch["input_ids"],
            "dropout_rng": rngs,
            "train": train,
            "params": params,
        }
        gathers = takes_masked_positions(model)
        if gathers:
            inputs["masked_positions"] = positions
        if "segment_ids" in batch:
            inputs |= visible(model, batch["segment_ids"])
        output, changed = model(**inputs, extra=model.extra if extra is None else extra)
        logits = output.logits
        if not gathers:
            flat = logits.reshape(positions.shape[0], -1, logits.shape[-1])
            logits = jnp.take_along_axis(flat, positions[..., None], axis=1)
        total, count, right = cross_entropy(logits, labels, model.config.vocab_size)
        return total, count, {"extra": changed, "totals": {"correct": right}}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Loss, accuracy over masked tokens, and perplexity."""
        return {**super().metrics(totals), "accuracy": totals["correct"] / max(totals["count"], 1)}

    def samples(self, model: Any, params: Any, rows: Any, count: int) -> list[samples.Sample]:
        """Guess a hidden token."""
        shown = samples.pick(rows, count)
        return samples.filled(model, params, self.tokenizer, shown, self.special)

    def head_share(self) -> float:
        """The head sees masked positions only."""
        return self.arguments.mlm_probability


def takes_masked_positions(model: Any) -> bool:
    """Tell whether the model's head can run at given positions only."""
    return "masked_positions" in inspect.signature(model.module_class.__call__).parameters
