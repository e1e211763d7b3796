"""Masked language modelling: predict tokens that were hidden (Devlin et al., 2018, section 3.1)."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import DataArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows
from hfseq.data.tokenizers import special_ids, word_start_table
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, Sample
from hfseq.objectives.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

#: Answers that a sample shows.
SAMPLE_GUESSES = 3


def mask_tokens(
    rows: Arrays,
    random: RowRandom,
    *,
    mask_id: int,
    vocab_size: int,
    special: np.ndarray,
    probability: float = 0.15,
    word_starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens to predict and hide them: 80 % behind the mask, 10 % behind a random token.

    ``rows`` are arrays of ``Rows.fetch``, (n, length); rows marked not "valid" get no targets.
    ``special``, bool (vocab,), marks ids that are never chosen; neither is padding. With
    ``word_starts``, bool (vocab,), words are chosen as a whole, and "continues" in ``rows`` adds
    tokens that continue one. A row's masks depend on ``random`` and the row alone.

    Returns input_ids and labels, int32 (n, length); labels are -100 where nothing is predicted.
    """
    ids, segments = rows["input_ids"], rows["segment_ids"]
    length = ids.shape[1]
    candidates = (segments > 0) & ~special[ids]
    if "valid" in rows:
        candidates &= rows["valid"][:, None]
    draw = random.uniform(length)
    if word_starts is not None:
        # A token draws what the first one of its word does; special tokens and documents end words.
        starts = word_starts[ids]
        if "continues" in rows:
            starts &= rows["continues"] == 0
        starts[:, 0] = True
        starts[:, 1:] |= ~candidates[:, :-1] | (segments[:, 1:] != segments[:, :-1])
        begins = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)
        draw = np.take_along_axis(draw, begins, axis=1)
    chosen = candidates & (draw < probability)
    kind, others = random.uniform(length), random.integers(vocab_size, length)
    hidden = np.where(kind < 0.8, np.int32(mask_id), np.where(kind < 0.9, others, ids))
    return np.where(chosen, hidden, ids), np.where(chosen, ids, np.int32(IGNORE_INDEX))


def target_capacity(tokens: int, probability: float) -> int:
    """Targets to make room for among ``tokens``: the mean and five deviations, a multiple of 8."""
    mean = tokens * probability
    room = math.ceil((mean + 5 * math.sqrt(mean * (1 - probability))) / 8) * 8
    return max(8, min(room, math.ceil(tokens / 8) * 8))


def gather_masked(
    labels: np.ndarray, groups: int, probability: float
) -> tuple[np.ndarray, np.ndarray]:
    """Collect the targets of ``groups`` equal parts of a batch, for a head that sees only them.

    Returns positions, int32 (groups, K), into the flattened rows of the group, and their labels,
    int32 (groups, K). K is ``capacity``, so that shapes stay the same from step to step; should a
    group have more targets, K grows in steps of a quarter, and none is lost. Free places have
    position 0 and label -100.
    """
    flat = labels.reshape(groups, -1)
    group, position = np.nonzero(flat != IGNORE_INDEX)
    counts = np.bincount(group, minlength=groups)
    room = target_capacity(flat.shape[1], probability)
    while room < counts.max():
        room = math.ceil(room * 1.25 / 8) * 8
    rank = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.zeros((groups, room), np.int32)
    targets = np.full((groups, room), IGNORE_INDEX, np.int32)
    positions[group, rank] = position
    targets[group, rank] = flat[group, position]
    return positions, targets


class MaskedLM(Objective):
    """Dynamic 80/10/10 masking; the head runs at masked positions only, with the same loss."""

    name = "mlm"
    auto_class = "ForMaskedLM"
    row_layout = base.KnownRows()
    sums: ClassVar[tuple[str, ...]] = ("correct",)

    arguments: DataArguments

    def setup(self) -> None:
        """Read off the vocabulary what is never hidden, and where words begin."""
        tokenizer, size = self.tokenizer, self.config.vocab_size
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "masked language modelling needs a tokenizer with a mask token; this one has none: "
                "train one with scripts/train_tokenizer.py --model_type roberta, or set "
                "tokenizer.mask_token"
            )
        self.special = special_ids(tokenizer, size)
        whole = self.arguments.whole_word_masking or self.arguments.train_ref_file
        self.word_starts = word_start_table(tokenizer, size) if whole else None

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Mask the rows; targets are gathered in ``groups`` equal parts, one a data shard."""
        inputs, labels = mask_tokens(
            rows,
            random,
            mask_id=self.tokenizer.mask_token_id,
            vocab_size=len(self.tokenizer),
            special=self.special,
            probability=self.arguments.mlm_probability,
            word_starts=self.word_starts,
        )
        positions, targets = gather_masked(labels, groups, self.arguments.mlm_probability)
        batch = {"input_ids": inputs, "segment_ids": rows["segment_ids"]}
        return batch | {"masked_positions": positions, "labels": targets}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the cross-entropy at the masked positions."""
        positions, labels = batch["masked_positions"], batch["labels"]
        # Whether the head can run at given positions only.
        gathers = "masked_positions" in inspect.signature(model.module_class.__call__).parameters
        inputs: dict[str, Any] = {"masked_positions": positions} if gathers else {}
        if "segment_ids" in batch:
            inputs |= base.attention_inputs(model, batch["segment_ids"])
        output, changed = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            **inputs,
        )
        logits = output.logits
        if not gathers:
            flat = logits.reshape(positions.shape[0], -1, logits.shape[-1])
            logits = jnp.take_along_axis(flat, positions[..., None], axis=1)
        total, count, right = cross_entropy(logits, labels, model.config.vocab_size)
        return total, count, {"extra": changed, "totals": {"correct": right}}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Hide a token in the middle of each row and let the model guess it."""
        shown, tokenizer = base.sample_rows(rows, count), self.tokenizer
        ids, real = shown["input_ids"].copy(), shown["segment_ids"] > 0
        ordinary = real & ~self.special[ids]
        kept = ordinary.any(axis=1)
        ids, real, ordinary = ids[kept], real[kept], ordinary[kept]
        if not len(ids):
            return []
        hidden = [int(np.flatnonzero(row)[row.sum() // 2]) for row in ordinary]
        row_numbers = np.arange(len(ids))
        ids[row_numbers, hidden] = tokenizer.mask_token_id
        logits = model(ids, attention_mask=real.astype(np.int32), params=params).logits
        chances = np.asarray(jax.nn.softmax(logits[row_numbers, np.array(hidden)], axis=-1))
        best = np.argsort(-chances, axis=-1)[:, :SAMPLE_GUESSES].tolist()
        legible = ordinary | (ids == tokenizer.mask_token_id)

        def text(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens)).strip()

        samples = []
        for row, mask, guesses, chance in zip(ids, legible, best, chances, strict=True):
            answers = (f"{text([i])} ({chance[i]:.0%})" for i in guesses)
            samples.append((text(row[mask].tolist()), ", ".join(answers)))
        return samples

    def head_share(self) -> float:
        """The head sees masked positions only."""
        return self.arguments.mlm_probability
