"""Masked language modeling: predict masked tokens (Devlin et al., 2018, section 3.1)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import DataArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows
from hfseq.data.tokenizers import special_ids, word_start_table
from hfseq.errors import UsageError
from hfseq.nn import sharding
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, Sample
from hfseq.objectives.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

#: Number of predictions shown per sample.
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
    """Selects the tokens to predict, and replaces most of them in the inputs.

    80 % of the selected tokens are replaced by the mask token and 10 % by a random token. 10 % are
    not changed. The selection in a row depends only on ``random`` and that row.

    Args:
        rows: Arrays of ``Rows.fetch``, `(rows, length)`. No tokens are selected in rows for which
            "valid" is false. "continues" marks tokens that continue a word.
        random: Source of random numbers.
        mask_id: ID of the mask token.
        vocab_size: Random tokens have IDs below this number.
        special: True for token IDs that are never selected, bool `(vocab_size,)`. Padding is never
            selected either.
        probability: Fraction of the tokens (or words) to select.
        word_starts: True for token IDs that begin a word, bool `(vocab_size,)`. If given, whole
            words are selected.

    Returns:
        The inputs and the labels, int32 `(rows, length)`. Labels are -100 at tokens that are not
        predicted.
    """
    ids, segments = rows["input_ids"], rows["segment_ids"]
    length = ids.shape[1]
    candidates = (segments > 0) & ~special[ids]
    if "valid" in rows:
        candidates &= rows["valid"][:, None]
    draw = random.uniform(length)
    if word_starts is not None:
        # All tokens of a word use the random number of its first token. A word also ends at a
        # special token or a document boundary.
        starts_word = word_starts[ids]
        if "continues" in rows:
            starts_word &= rows["continues"] == 0
        starts_word[:, 0] = True
        starts_word[:, 1:] |= ~candidates[:, :-1] | (segments[:, 1:] != segments[:, :-1])
        word_begin = np.maximum.accumulate(np.where(starts_word, np.arange(length), 0), axis=1)
        draw = np.take_along_axis(draw, word_begin, axis=1)
    is_target = candidates & (draw < probability)
    action, random_ids = random.uniform(length), random.integers(vocab_size, length)
    corrupted = np.where(action < 0.8, np.int32(mask_id), np.where(action < 0.9, random_ids, ids))
    return np.where(is_target, corrupted, ids), np.where(is_target, ids, np.int32(IGNORE_INDEX))


def target_capacity(tokens: int, probability: float) -> int:
    """Returns the number of array entries to allocate for the targets among ``tokens`` tokens.

    This is the expected number of targets plus five standard deviations, rounded up to a multiple
    of 8.
    """
    mean = tokens * probability
    capacity = math.ceil((mean + 5 * math.sqrt(mean * (1 - probability))) / 8) * 8
    return max(8, min(capacity, math.ceil(tokens / 8) * 8))


def gather_masked(
    labels: np.ndarray, groups: int, probability: float
) -> tuple[np.ndarray, np.ndarray]:
    """Collects the positions and labels of the targets.

    The head is then computed only at these positions. The batch is divided into ``groups`` equal
    parts. Each part gets K entries, where K is :func:`target_capacity`, so that shapes are the same
    in every step. If a part has more than K targets, K is increased repeatedly by a quarter, so
    that no target is lost. Unused entries have position 0 and label -100.

    Args:
        labels: Labels, `(rows, length)`.
        groups: Number of parts.
        probability: Expected fraction of the tokens that are targets.

    Returns:
        The positions, as indices into the flattened rows of a part, and the labels, both int32
        `(groups, K)`.
    """
    flat = labels.reshape(groups, -1)
    group, position = np.nonzero(flat != IGNORE_INDEX)
    counts = np.bincount(group, minlength=groups)
    capacity = target_capacity(flat.shape[1], probability)
    while capacity < counts.max():
        capacity = math.ceil(capacity * 1.25 / 8) * 8
    rank = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.zeros((groups, capacity), np.int32)
    targets = np.full((groups, capacity), IGNORE_INDEX, np.int32)
    positions[group, rank] = position
    targets[group, rank] = flat[group, position]
    return positions, targets


def scatter_labels(positions: jax.Array, targets: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reverts :func:`gather_masked`.

    Args:
        positions: Indices of the tokens to predict within their group, `(groups, capacity)`.
        targets: Their labels, `(groups, capacity)`.
        shape: Shape of the result, `(rows, length)`.

    Returns:
        The labels of all tokens, int32, -100 for tokens that are not predicted.
    """
    groups = positions.shape[0]
    labels = jnp.full((groups, math.prod(shape) // groups), IGNORE_INDEX, targets.dtype)
    # Unused entries have the position 0 and the label -100, which does not replace a label.
    return labels.at[jnp.arange(groups)[:, None], positions].max(targets).reshape(shape)


class MaskedLM(Objective):
    """Masked language modeling with dynamic 80/10/10 masking.

    The language modeling head is computed only at the tokens to predict. This does not change the
    loss.
    """

    name = "mlm"
    auto_class = "ForMaskedLM"
    row_guarantees = base.RowGuarantees()
    sums: ClassVar[tuple[str, ...]] = ("correct",)
    variable_width: ClassVar[Mapping[str, int]] = {"masked_positions": 0, "labels": IGNORE_INDEX}

    #: Whether the head is computed at all positions, and not only at the tokens to predict.
    computes_all_logits: bool = False

    arguments: DataArguments

    def setup(self) -> None:
        """Looks up special tokens and, for whole-word masking, word starts in the vocabulary."""
        tokenizer, size = self.tokenizer, self.config.vocab_size
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "masked language modeling requires a tokenizer with a mask token. Train one with "
                "scripts/train_tokenizer.py --model_type roberta, or set tokenizer.mask_token."
            )
        self.is_special = special_ids(tokenizer, size)
        whole_words = self.arguments.whole_word_masking or self.arguments.train_ref_file
        self.word_starts = word_start_table(tokenizer, size) if whole_words else None

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Masks the rows and gathers the targets of each of the ``groups`` parts."""
        inputs, labels = mask_tokens(
            rows,
            random,
            mask_id=self.tokenizer.mask_token_id,
            vocab_size=len(self.tokenizer),
            special=self.is_special,
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
        """Returns the cross-entropy summed over the tokens to predict."""
        positions, labels = batch["masked_positions"], batch["labels"]
        # Whether the head can be computed at selected positions only.
        takes_positions = (
            not self.computes_all_logits
            and "masked_positions" in inspect.signature(model.module_class.__call__).parameters
        )
        inputs: dict[str, Any] = {"masked_positions": positions} if takes_positions else {}
        if "segment_ids" in batch:
            inputs |= base.attention_inputs(model, batch["segment_ids"])
        output, new_extra = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            **inputs,
        )
        logits = output.logits
        if self.computes_all_logits:
            labels = scatter_labels(positions, labels, batch["input_ids"].shape)
        elif not takes_positions:
            flat = logits.reshape(positions.shape[0], -1, logits.shape[-1])
            logits = jnp.take_along_axis(flat, positions[..., None], axis=1)
        total, count, correct = cross_entropy(logits, labels, model.config.vocab_size)
        return total, count, {"extra": new_extra, "totals": {"correct": correct}}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Masks a token in the middle of each row and returns the most probable predictions."""
        batch, tokenizer = base.sample_rows(rows, count), self.tokenizer
        ids, real = batch["input_ids"].copy(), batch["segment_ids"] > 0
        ordinary = real & ~self.is_special[ids]
        has_ordinary = ordinary.any(axis=1)
        ids, real, ordinary = ids[has_ordinary], real[has_ordinary], ordinary[has_ordinary]
        if not len(ids):
            return []
        masked_positions = [int(np.flatnonzero(row)[row.sum() // 2]) for row in ordinary]
        row_numbers = np.arange(len(ids))
        ids[row_numbers, masked_positions] = tokenizer.mask_token_id
        logits = model(ids, attention_mask=real.astype(np.int32), params=params).logits
        masked_logits = sharding.replicate(logits[row_numbers, np.array(masked_positions)])
        probabilities = np.asarray(jax.nn.softmax(masked_logits, axis=-1))
        best = np.argsort(-probabilities, axis=-1)[:, :SAMPLE_GUESSES].tolist()
        visible = ordinary | (ids == tokenizer.mask_token_id)

        def text(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens)).strip()

        samples = []
        for row, mask, guesses, row_probabilities in zip(
            ids, visible, best, probabilities, strict=True
        ):
            answers = (f"{text([i])} ({row_probabilities[i]:.0%})" for i in guesses)
            samples.append((text(row[mask].tolist()), ", ".join(answers)))
        return samples

    def head_share(self) -> float:
        """Returns the masking probability, because the head is computed at these positions only."""
        return self.arguments.mlm_probability
