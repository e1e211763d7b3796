"""The collator class of transformers 4's Flax scripts, for loops of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hfseq.data.tokenizers import special_ids


@dataclass
class FlaxDataCollatorForLanguageModeling:
    """Pad examples and mask tokens at random: 80 % mask, 10 % random, 10 % unchanged.

    Labels are -100 wherever nothing is to be predicted. Without ``mlm`` the labels are the inputs,
    -100 on padding. The scripts of hfseq use ``objectives.masking``, whose masks depend on the step
    and the row only; this one draws from a generator of its own.

    Raises:
        ValueError: masking is asked for and the tokenizer has no mask token.
    """

    tokenizer: Any
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

    def __call__(
        self, examples: Sequence[dict], pad_to_multiple_of: int = 16
    ) -> dict[str, np.ndarray]:
        """Pad the examples to one length and return numpy arrays, with "labels"."""
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
        """Return the masked inputs and the labels."""
        if special_tokens_mask is None:
            special_tokens_mask = special_ids(self.tokenizer)[inputs]
        chosen = (
            self.generator.random(inputs.shape) < self.mlm_probability
        ) & ~special_tokens_mask.astype(bool)
        kind = self.generator.random(inputs.shape)
        random_ids = self.generator.integers(self.tokenizer.vocab_size, size=inputs.shape)
        masked = np.where(chosen & (kind < 0.8), self.tokenizer.mask_token_id, inputs)
        masked = np.where(chosen & (kind >= 0.8) & (kind < 0.9), random_ids, masked)
        return masked.astype(inputs.dtype), np.where(chosen, inputs, -100)
