"""What ELECTRA and ALBERT learn from text beside hidden tokens: replaced ones, and order."""

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
    """Tell of every token whether it was replaced (Clark et al., 2020, section 2).

    ``mlm_probability`` of the tokens are, by another one of their row: what is common in a text is
    a common replacement. There is no generator that would propose likelier ones.
    """

    name = "rtd"
    auto_class = "ForPreTraining"
    row_layout = base.KnownRows()
    sums = ("correct", "replaced", "found")

    arguments: DataArguments

    def setup(self) -> None:
        """Read off the vocabulary what is never replaced."""
        self.special = special_ids(self.tokenizer, self.config.vocab_size)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Refuse a model that has no number for each token."""
        if "Electra" not in type(model).__name__ and not hasattr(model, "tells_replaced_tokens"):
            raise UsageError(
                f"--objective rtd trains a discriminator, and {type(model).__name__} is none: take "
                "--model_type electra, or say tells_replaced_tokens = True in a class whose logits "
                "are (batch, length)"
            )

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Replace tokens; labels are 1 where one was, 0 elsewhere and -100 on padding."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        count, length = ids.shape
        real = segments > 0
        if "valid" in rows:
            real &= rows["valid"][:, None]
        ordinary = real & ~self.special[ids]
        # The ordinary tokens of a row first, and which of them to take.
        order = np.argsort(~ordinary, axis=1, kind="stable")
        known = np.maximum(ordinary.sum(1, keepdims=True), 1)
        taken = (random.uniform(length) * known).astype(np.int64)
        others = np.take_along_axis(ids, np.take_along_axis(order, taken, 1), 1)
        chosen = ordinary & (random.uniform(length) < self.arguments.mlm_probability)
        inputs = np.where(chosen, others, ids)
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
        """Sum the cross-entropy of replaced against original over all real tokens."""
        labels = batch["labels"]
        inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
        output, changed = base.forward(
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
        each = jax.nn.softplus(logits) - jnp.where(replaced, logits, 0)
        found = counted & replaced & (logits > 0)
        right = counted & ((logits > 0) == replaced)
        totals = {"correct": right.sum(), "replaced": replaced.sum(), "found": found.sum()}
        total = jnp.where(counted, each, 0).sum()
        return total, counted.sum(), {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return what every objective does, and the share of replaced tokens that were found."""
        recall = totals["found"] / max(totals["replaced"], 1)
        return super().metrics(totals) | {"recall": recall}


class SentenceOrder(MaskedLM):
    """Masked language modelling, and whether two pieces of text stand in order (Lan et al., 2019).

    A row is cut in its middle, and its halves change places half of the time; class 1 says so. The
    loss is the mean of masked tokens and, as large, that of rows.
    """

    name = "sop"
    auto_class = "ForPreTraining"
    sums = ("correct", "order", "ordered")

    def setup(self) -> None:
        """Read off the vocabulary what begins a row and ends a piece."""
        super().setup()
        self.first, self.end = (
            getattr(self.tokenizer, f"{name}_token_id") for name in ("cls", "sep")
        )
        if self.first is None or self.end is None:
            raise UsageError(
                "--objective sop writes [CLS] one [SEP] other [SEP]; this tokenizer has no "
                f"{'cls' if self.first is None else 'sep'} token: train one with "
                "scripts/train_tokenizer.py --model_type bert"
            )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Refuse a model without a head for pairs."""
        names = model.module_class.__name__, type(model).__name__
        if not type(model).__name__.endswith("ForPreTraining") or "Electra" in names[1]:
            raise UsageError(
                f"--objective sop needs a head for the order of two pieces, which {names[1]} has "
                "not: take --model_type albert, bert or big_bird"
            )

    def row_length(self, length: int) -> int:
        """Return the tokens of text, beside the three special ones."""
        if length < 5:
            raise UsageError(
                f"--max_seq_length {length} leaves no text in a row of --objective sop, which is "
                "[CLS] one [SEP] other [SEP]: give at least 5"
            )
        return length - 3

    @property
    def cross_documents(self) -> bool:
        """A row is one text, which is cut."""
        return True

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Cut rows, change halves, and hide tokens."""
        given, real = rows["input_ids"], rows["segment_ids"] > 0
        count, width = len(given), given.shape[1] + 3
        ids = np.full((count, width), self.tokenizer.pad_token_id or 0, np.int32)
        types, segments = np.zeros_like(ids), np.zeros_like(ids)
        swapped = random.uniform(1)[:, 0] < 0.5
        for row in range(count):
            text = given[row][real[row] & ~self.special[given[row]]]
            pieces = [text[: len(text) // 2], text[len(text) // 2 :]]
            one, other = pieces[::-1] if swapped[row] else pieces
            joined = [self.first, *one, self.end, *other, self.end]
            ids[row, : len(joined)] = joined
            segments[row, : len(joined)] = 1
            types[row, len(one) + 2 : len(joined)] = 1
        valid = rows.get("valid", np.ones(count, bool))
        inputs, labels = mask_tokens(
            {"input_ids": ids, "segment_ids": segments, "valid": valid},
            random,
            mask_id=self.tokenizer.mask_token_id,
            vocab_size=len(self.tokenizer),
            special=self.special,
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
        """Sum the cross-entropy at the masked positions, and that of the order as heavy."""
        output, changed = base.forward(
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
        total, count, right = cross_entropy(masked, batch["labels"], model.config.vocab_size)
        order = output.get("sop_logits", output.get("seq_relationship_logits"))
        wrong, rows, ordered = cross_entropy(order, batch["order"], order.shape[-1])
        # A row counts as much as the targets that a row has on average.
        weight = self.arguments.mlm_probability * (length - 3)
        totals = {"correct": right, "order": rows, "ordered": ordered}
        return total + weight * wrong, count, {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return what every objective does, of both together, and the share of right orders."""
        ordered = totals["ordered"] / max(totals["order"], 1)
        return super().metrics(totals) | {"order_accuracy": ordered}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Return none: the head over the vocabulary is one of two here."""
        return []

    def head_share(self) -> float:
        """The head sees every position."""
        return 1.0
