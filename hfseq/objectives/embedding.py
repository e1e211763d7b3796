"""Contrastive training of text embeddings.

The loss is InfoNCE over the texts of the global batch (van den Oord et al., 2018; Henderson et al.,
2017). It corresponds to sentence-transformers' MultipleNegativesRankingLoss, optionally combined
with MatryoshkaLoss (Kusupati et al., 2022).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import EmbeddingArguments
from hfseq.data.batches import IGNORE_INDEX, GroupedRows, RowRandom
from hfseq.data.records import Records, drop_invalid, load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError
from hfseq.modeling.sentence import SentenceConfig, l2_normalize
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Positives with a larger rank than this do not count in the mean reciprocal rank.
MRR_CUTOFF = 10


class Embedding(Objective):
    """Trains embeddings so that each anchor is most similar to its own positive.

    The loss compares an anchor with all positives and negatives of the global batch. With
    ``--gradient_accumulation_steps``, it compares an anchor with the texts of its micro-batch only.
    Evaluation ranks each anchor's positive among the positives of the whole split.
    """

    name = "embedding"
    data_arguments = EmbeddingArguments
    auto_class = "Model"
    pipeline_tag = "sentence-similarity"
    tags = ("sentence-transformers", "feature-extraction")
    supports_streaming = False
    has_vocabulary = False
    evaluates_test = supports_predict = True
    sums = ("correct",)
    default_length = 256

    arguments: EmbeddingArguments

    def setup(self) -> None:
        """Selects the text columns and skips examples without usable texts."""
        self.columns: dict[str, list[str]] = {}
        self.splits: dict[str, Records] = {}
        for split, records in load_records(self.arguments).items():
            columns = self.columns[split] = text_columns(records)
            problems = {}
            for row in range(len(records)):
                example = records[row]
                for name in columns:
                    text = example.get(name)
                    if not isinstance(text, str) or not text.strip():
                        problems[row] = f"'{name}' must be a non-empty text, not {text!r:.60}"
            self.splits[split] = drop_invalid(records, split, problems, self.arguments)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Configures how the model computes embeddings, both in training and after it is saved."""
        data, config = self.arguments, model.sentence_config or SentenceConfig()
        self.sentence_config = dataclasses.replace(
            config,
            pooling=config.pooling if data.pooling is None else (data.pooling,),
            normalize=data.normalize,
            max_seq_length=self.choose_length(model.max_length()),
        )
        num_features = model.text_config.hidden_size
        num_features = (
            self.sentence_config.dense[-1].kernel.shape[1]
            if self.sentence_config.dense
            else num_features
        )
        if too_large := [dim for dim in data.dims if dim > num_features]:
            raise UsageError(
                f"--matryoshka_dims {too_large[0]} exceeds the embedding size {num_features}"
            )
        self.dims = data.dims or (num_features,)
        model.sentence_config = self.sentence_config

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the texts of a split."""
        records = splits[split]
        examples = [records[row] for row in range(len(records))]
        sides, num_truncated = [], 0
        for name in self.columns[split]:
            texts = [example[name].strip() for example in examples]
            if self.sentence_config.do_lower_case:
                texts = [text.lower() for text in texts]
            ids = self.tokenizer(texts, verbose=False)["input_ids"]
            too_long = [row for row, text_ids in enumerate(ids) if len(text_ids) > length]
            num_truncated += len(too_long)
            if too_long:
                truncated = self.tokenizer(
                    [texts[row] for row in too_long], truncation=True, max_length=length
                )
                for row, text_ids in zip(too_long, truncated["input_ids"], strict=True):
                    ids[row] = text_ids
            sides.append(ids)
        if num_truncated:
            logger.info("%s: truncated %d texts to %d tokens", split, num_truncated, length)
        rows = GroupedRows(
            sides, pad_token_id(self.tokenizer), length, self.arguments.pad_to_max_length
        )
        logger.info("%s: %d examples of %s", split, len(rows), ", ".join(self.columns[split]))
        return rows, {"documents": len(rows), "tokens": rows.store.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Marks the valid rows. All other rows only pad the batch."""
        ids = rows["input_ids"]
        valid = rows["valid"] if "valid" in rows else np.ones(len(ids), bool)
        return {"input_ids": ids, "attention_mask": rows["segment_ids"], "valid": valid}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over anchors, and the totals for the metrics.

        In evaluation, the totals include the embeddings of anchors and positives.
        """
        rows, sides, width = batch["input_ids"].shape
        ids, mask = (batch[name].reshape(-1, width) for name in ("input_ids", "attention_mask"))
        output, new_extra = forward(model, params, rngs, train, extra, ids, attention_mask=mask)
        vectors = self.sentence_config(output.last_hidden_state, mask).reshape(rows, sides, -1)
        valid = batch["valid"]
        targets = jnp.where(valid, jnp.arange(rows) * (sides - 1), IGNORE_INDEX)
        total, correct = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for dim in self.dims:
            embeddings = l2_normalize(vectors[..., :dim])
            candidates = embeddings[:, 1:].reshape(rows * (sides - 1), dim)
            scores = self.arguments.scale * (embeddings[:, 0] @ candidates.T)
            # Rows that pad the batch are not negatives.
            scores = jnp.where(jnp.repeat(valid, sides - 1)[None], scores, -1e9)
            dim_loss, _, dim_correct = cross_entropy(scores, targets)
            total, correct = total + dim_loss, dim_correct if dim == max(self.dims) else correct
        totals: dict[str, jax.Array] = {"correct": correct}
        if not train:
            embeddings = l2_normalize(vectors)
            totals |= {"anchors": embeddings[:, 0], "positives": embeddings[:, 1]}
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss and the accuracy.

        The accuracy is the fraction of anchors whose positive is the most similar text of the
        batch.
        """
        metrics = super().metrics(totals)
        return {name: metrics[name] for name in ("loss", "accuracy")}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Ranks each anchor's positive among all positives of the split.

        Texts that are as similar to the anchor as its positive do not lower the rank. This is the
        case for copies of the positive.
        """
        anchors, positives = (np.asarray(rows[name]) for name in ("anchors", "positives"))
        ranks = np.empty(len(anchors), np.int64)
        for start in range(0, len(anchors), 1024):
            similarities = anchors[start : start + 1024] @ positives.T
            positive_similarities = similarities[
                np.arange(len(similarities)), np.arange(start, start + len(similarities))
            ]
            ranks[start : start + len(similarities)] = (
                similarities > positive_similarities[:, None] + 1e-6
            ).sum(axis=1) + 1
        return {
            "accuracy_at_1": float((ranks == 1).mean()),
            f"mrr_at_{MRR_CUTOFF}": float(np.where(ranks <= MRR_CUTOFF, 1 / ranks, 0.0).mean()),
        }

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        return {"loss", "accuracy", "accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}


def text_columns(records: Records) -> list[str]:
    """Returns the names of the text columns: anchor, positive and any negatives.

    If the table has no columns with these names, its text columns are used in order.

    Raises:
        UsageError: The table has fewer than two text columns.
    """
    table = records.tables[0]
    names = list(table.columns)
    if {"anchor", "positive"} <= set(names):
        negatives = [name for name in names if name.startswith("negative")]
        return ["anchor", "positive", *negatives]
    texts = [name for name in names if any(isinstance(c, str) for c in table.columns[name][:100])]
    if len(texts) < 2:
        raise UsageError(
            f"{table.origin} has the columns {', '.join(names)}, but at least two text columns are "
            "required. Name them anchor, positive and (optionally) negative, or provide text "
            "columns in this order."
        )
    return texts
