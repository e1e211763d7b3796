"""Causal language modelling: predict each token from those before it in its document."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from hfseq.labels import IGNORED
from hfseq.objectives.base import Objective, cross_entropy, visible


class CausalLM(Objective):
    """Next-token prediction on packed rows; losses are those of the documents one by one.

    The target at a token is the one after it in the same document, at the end of a row the one that
    begins the next row. With ``--cross_documents`` all text is one document.
    """

    name = "clm"
    auto_class = "ForCausalLM"
    sums = ("correct",)
    default_length = 1024

    @classmethod
    def configure(cls, config: Any, tokenizer: Any, fresh: bool) -> None:
        """Make an encoder (BERT, RoBERTa) a decoder: nothing else could predict the next token."""
        if hasattr(config, "is_decoder"):
            config.is_decoder = True

    def collate(
        self, rows: dict[str, np.ndarray], random: Any, groups: int
    ) -> dict[str, np.ndarray]:
        """Set each token's label to its successor, so that every position's logits are used."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        labels = np.full_like(ids, IGNORED)
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        labels[:, :-1] = np.where(same, ids[:, 1:], IGNORED)
        if "next_ids" in rows:
            follows = rows["next_ids"]
            labels[:, -1] = np.where((segments[:, -1] > 0) & (follows >= 0), follows, IGNORED)
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORED
        return {"input_ids": ids, "segment_ids": segments, "labels": labels}

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
        output, changed = model(
            input_ids=batch["input_ids"], **visible(model, batch["segment_ids"]), params=params,
            dropout_rng=rngs, train=train, extra=model.extra if extra is None else extra,
        )  # fmt: skip
        total, count, right = cross_entropy(output.logits, batch["labels"], model.config.vocab_size)
        return total, count, {"extra": changed, "totals": {"correct": right}}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Loss, perplexity and accuracy a token; the perplexity a word where words were counted."""
        found = {**super().metrics(totals), "accuracy": totals["correct"] / max(totals["count"], 1)}
        if "words" in totals:
            nats = totals["loss"] / max(totals["words"], 1)
            found["word_perplexity"] = math.exp(min(nats, 700.0))
        return found
