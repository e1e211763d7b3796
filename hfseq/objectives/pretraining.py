"""Pretraining objectives of ELECTRA (replaced token detection) and ALBERT (sentence order)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import DataArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows
from hfseq.data.tokenizers import special_ids
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, Sample
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.mlm import MaskedLM, gather_masked, mask_tokens

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


class ReplacedTokens(Objective):
    """Replaced token detection (Clark et al., 2020, section 2) without a generator.

    The fraction ``--mlm_probability`` of the tokens is replaced. Each replacement is a random token
    of the same row, so that frequent tokens are also frequent replacements.
    """

    name = "rtd"
    auto_class = "ForPreTraining"
    row_guarantees = base.RowGuarantees()
    sums = ("correct", "replaced", "found")

    arguments: DataArguments

    def setup(self) -> None:
        """Looks up the special tokens, which are never replaced."""
        self.is_special = special_ids(self.tokenizer, self.config.vocab_size)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks that the model returns one logit per token."""
        if "Electra" not in type(model).__name__ and not hasattr(model, "detects_replaced_tokens"):
            raise UsageError(
                f"--objective rtd trains a discriminator, but {type(model).__name__} is not one. "
                "Use --model_type electra, or set detects_replaced_tokens = True in a model class "
                "whose logits are (batch, length)."
            )

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Replaces tokens. Labels are 1 for replaced tokens, 0 for others and -100 for padding."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        count, length = ids.shape
        real = segments > 0
        if "valid" in rows:
            real &= rows["valid"][:, None]
        ordinary = real & ~self.is_special[ids]
        # Order the columns so that ordinary tokens come first, and draw one of them per position.
        order = np.argsort(~ordinary, axis=1, kind="stable")
        num_ordinary = np.maximum(ordinary.sum(1, keepdims=True), 1)
        picks = (random.uniform(length) * num_ordinary).astype(np.int64)
        replacements = np.take_along_axis(ids, np.take_along_axis(order, picks, 1), 1)
        is_replaced = ordinary & (random.uniform(length) < self.arguments.mlm_probability)
        inputs = np.where(is_replaced, replacements, ids)
        labels = np.where(real, (inputs != ids).astype(np.int32), np.int32(IGNORE_INDEX))
        return {"input_ids": inputs, "segment_ids": segments, "labels": labels}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the binary cross-entropy summed over all tokens except padding."""
        labels = batch["labels"]
        inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
        output, new_extra = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            **inputs,
        )
        logits = output.logits.astype(jnp.float32)
        counted, replaced = labels != IGNORE_INDEX, labels == 1
        losses = jax.nn.softplus(logits) - jnp.where(replaced, logits, 0)
        detected = counted & replaced & (logits > 0)
        correct = counted & ((logits > 0) == replaced)
        totals = {"correct": correct.sum(), "replaced": replaced.sum(), "found": detected.sum()}
        total = jnp.where(counted, losses, 0).sum()
        return total, counted.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Also returns the recall, which is the fraction of replaced tokens that are detected."""
        recall = totals["found"] / max(totals["replaced"], 1)
        return super().metrics(totals) | {"recall": recall}


class SentenceOrder(MaskedLM):
    """Masked language modeling plus sentence order prediction (Lan et al., 2019).

    Each row is split in the middle, and the halves are swapped with probability 0.5. Class 1 means
    that they are swapped. The loss is the sum of two means with equal weights: the mean loss of the
    masked tokens and the mean order loss of the rows.
    """

    name = "sop"
    auto_class = "ForPreTraining"
    sums = ("correct", "order", "ordered")

    def setup(self) -> None:
        """Looks up the [CLS] token, which starts a row, and [SEP], which ends each half."""
        super().setup()
        self.cls_id, self.sep_id = (
            getattr(self.tokenizer, f"{name}_token_id") for name in ("cls", "sep")
        )
        if self.cls_id is None or self.sep_id is None:
            raise UsageError(
                "`--objective sop` requires rows of the form [CLS] first half [SEP] second half "
                "[SEP], but this tokenizer has no "
                f"{'cls' if self.cls_id is None else 'sep'} token. Train a tokenizer with "
                "scripts/train_tokenizer.py --model_type bert."
            )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks that the model has a head for sentence pairs."""
        names = model.module_class.__name__, type(model).__name__
        if not type(model).__name__.endswith("ForPreTraining") or "Electra" in names[1]:
            raise UsageError(
                f"`--objective sop` requires a sentence order head, which {names[1]} does not "
                "have. Use --model_type albert, bert or big_bird."
            )

    def row_length(self, length: int) -> int:
        """Returns the number of tokens of text per row, without the three special tokens."""
        if length < 5:
            raise UsageError(
                f"--max_seq_length {length} leaves no space for text in the rows [CLS] first half "
                "[SEP] second half [SEP] of --objective sop. Use at least 5."
            )
        return length - 3

    @property
    def cross_documents(self) -> bool:
        """Always ``True``, because a row is one text that is split in the middle."""
        return True

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Splits the rows, swaps the halves of some of them, and masks tokens."""
        row_ids, real = rows["input_ids"], rows["segment_ids"] > 0
        count, width = len(row_ids), row_ids.shape[1] + 3
        ids = np.full((count, width), self.tokenizer.pad_token_id or 0, np.int32)
        types, segments = np.zeros_like(ids), np.zeros_like(ids)
        swapped = random.uniform(1)[:, 0] < 0.5
        for row in range(count):
            text = row_ids[row][real[row] & ~self.is_special[row_ids[row]]]
            pieces = [text[: len(text) // 2], text[len(text) // 2 :]]
            first, second = pieces[::-1] if swapped[row] else pieces
            sequence = [self.cls_id, *first, self.sep_id, *second, self.sep_id]
            ids[row, : len(sequence)] = sequence
            segments[row, : len(sequence)] = 1
            types[row, len(first) + 2 : len(sequence)] = 1
        valid = rows.get("valid", np.ones(count, bool))
        inputs, labels = mask_tokens(
            {"input_ids": ids, "segment_ids": segments, "valid": valid},
            random,
            mask_id=self.tokenizer.mask_token_id,
            vocab_size=len(self.tokenizer),
            special=self.is_special,
            probability=self.arguments.mlm_probability,
        )
        positions, targets = gather_masked(labels, groups, self.arguments.mlm_probability)
        order = np.where(valid, swapped.astype(np.int32), np.int32(IGNORE_INDEX))
        return {
            "input_ids": inputs,
            "token_type_ids": types,
            "segment_ids": segments,
            "masked_positions": positions,
            "labels": targets,
            "order": order,
        }

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the summed cross-entropy of the masked tokens, plus the weighted order loss."""
        output, new_extra = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            attention_mask=(batch["segment_ids"] > 0).astype(jnp.int32),
        )
        positions, length = batch["masked_positions"], batch["input_ids"].shape[1]
        logits = output.prediction_logits
        flat = logits.reshape(positions.shape[0], -1, logits.shape[-1])
        masked = jnp.take_along_axis(flat, positions[..., None], axis=1)
        total, count, correct = cross_entropy(masked, batch["labels"], model.config.vocab_size)
        order_logits = output.get("sop_logits", output.get("seq_relationship_logits"))
        order_loss, num_rows, ordered = cross_entropy(
            order_logits, batch["order"], order_logits.shape[-1]
        )
        # Weight each row by the expected number of masked tokens per row.
        weight = self.arguments.mlm_probability * (length - 3)
        totals = {"correct": correct, "order": num_rows, "ordered": ordered}
        return total + weight * order_loss, count, {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Also returns the accuracy of the predicted order.

        Loss and perplexity are computed from the sum of both losses.
        """
        ordered = totals["ordered"] / max(totals["order"], 1)
        return super().metrics(totals) | {"order_accuracy": ordered}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Returns no samples. The samples of masked language modeling require a single head."""
        return []

    def head_share(self) -> float:
        """Returns 1, because the head is computed at every position."""
        return 1.0
