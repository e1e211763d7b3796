"""Vectors of texts: those that belong together become alike, all others of a batch do not.

InfoNCE over the positives of the global batch (van den Oord et al., 2018; Henderson et al., 2017),
as MultipleNegativesRankingLoss of sentence-transformers has it, with MatryoshkaLoss
(Kusupati et al., 2022) on request.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import EmbeddingArguments
from hfseq.data.batches import IGNORE_INDEX, FieldRows, RowRandom
from hfseq.data.records import Records, drop_invalid, load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError
from hfseq.modeling.sentence import SentenceConfig, l2_normalize
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Of how many neighbours the rank of the right one counts.
MRR_CUTOFF = 10


class MultiTextRows(FieldRows):
    """Row i is example i: so many ``sides``, each the tokens of a text, (rows, sides, width)."""

    def __init__(
        self,
        sides: Sequence[Sequence[Sequence[int]]],
        pad: int,
        max_length: int,
        pad_to_max_length: bool,
    ):
        self.sides = len(sides)
        rows = [ids for example in zip(*sides, strict=True) for ids in example]
        super().__init__(rows, pad, max_length, {}, {}, pad_to_max_length)

    def __len__(self) -> int:
        return len(self.store) // self.sides

    def _documents(self, indices: np.ndarray) -> np.ndarray:
        return (np.asarray(indices)[:, None] * self.sides + np.arange(self.sides)).ravel()

    def width(self, indices: np.ndarray) -> int:
        """The narrowest of the widths that holds all sides of these rows."""
        return super().width(self._documents(indices))

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide."""
        rows = super().fetch(self._documents(indices), width or self.width(indices))
        return {name: ids.reshape(len(indices), self.sides, -1) for name, ids in rows.items()}


class Embedding(Objective):
    """Each anchor has to find its positive among all positives and negatives of the global batch.

    A micro-batch of ``--gradient_accumulation_steps`` compares what is in it alone. Evaluation
    looks each anchor's positive up among those of the whole split.
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
        """Find the columns, and leave out what cannot be learned from."""
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
                        problems[row] = f"'{name}' is no text but {text!r:.60}"
            self.splits[split] = drop_invalid(records, split, problems, self.arguments)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Say how the model makes vectors, in what is saved, too."""
        data, said = self.arguments, model.sentence_config or SentenceConfig()
        self.how = dataclasses.replace(
            said,
            pooling=said.pooling if data.pooling is None else (data.pooling,),
            normalize=data.normalize,
            max_seq_length=self.choose_length(model.max_length()),
        )
        features = model.text_config.hidden_size
        features = self.how.dense[-1].kernel.shape[1] if self.how.dense else features
        if wide := [dim for dim in data.dims if dim > features]:
            raise UsageError(f"--matryoshka_dims {wide[0]}: the vectors have {features} features")
        self.dims = data.dims or (features,)
        model.sentence_config = self.how

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenise the texts of a split."""
        records = splits[split]
        examples = [records[row] for row in range(len(records))]
        sides, cut = [], 0
        for name in self.columns[split]:
            texts = [example[name].strip() for example in examples]
            if self.how.do_lower_case:
                texts = [text.lower() for text in texts]
            ids = self.tokenizer(texts, verbose=False)["input_ids"]
            long = [row for row, one in enumerate(ids) if len(one) > length]
            cut += len(long)
            if long:
                shorter = self.tokenizer(
                    [texts[row] for row in long], truncation=True, max_length=length
                )
                for row, one in zip(long, shorter["input_ids"], strict=True):
                    ids[row] = one
            sides.append(ids)
        if cut:
            logger.info("%s: %d texts are longer than %d tokens and were cut", split, cut, length)
        rows = MultiTextRows(
            sides, pad_token_id(self.tokenizer), length, self.arguments.pad_to_max_length
        )
        logger.info("%s: %d examples of %s", split, len(rows), ", ".join(self.columns[split]))
        return rows, {"documents": len(rows), "tokens": rows.store.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Say which rows count; the others only fill a batch up."""
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
        """Sum the loss of anchors; in evaluation the vectors of each row come along."""
        rows, sides, width = batch["input_ids"].shape
        ids, mask = (batch[name].reshape(-1, width) for name in ("input_ids", "attention_mask"))
        output, changed = forward(model, params, rngs, train, extra, ids, attention_mask=mask)
        vectors = self.how(output.last_hidden_state, mask).reshape(rows, sides, -1)
        valid = batch["valid"]
        targets = jnp.where(valid, jnp.arange(rows) * (sides - 1), IGNORE_INDEX)
        total, right = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for dim in self.dims:
            units = l2_normalize(vectors[..., :dim])
            others = units[:, 1:].reshape(rows * (sides - 1), dim)
            scores = self.arguments.scale * (units[:, 0] @ others.T)
            # What fills the batch up is nobody's negative.
            scores = jnp.where(jnp.repeat(valid, sides - 1)[None], scores, -1e9)
            part, _, found = cross_entropy(scores, targets)
            total, right = total + part, found if dim == max(self.dims) else right
        totals: dict[str, jax.Array] = {"correct": right}
        if not train:
            units = l2_normalize(vectors)
            totals |= {"anchors": units[:, 0], "positives": units[:, 1]}
        return total, valid.sum(), {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss, and how many anchors find their positive in their batch."""
        metrics = super().metrics(totals)
        return {name: metrics[name] for name in ("loss", "accuracy")}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Look each anchor's positive up among all of the split.

        An equal text is as right as the anchor's own.
        """
        anchors, positives = (np.asarray(rows[name]) for name in ("anchors", "positives"))
        ranks = np.empty(len(anchors), np.int64)
        for start in range(0, len(anchors), 1024):
            part = anchors[start : start + 1024] @ positives.T
            own = part[np.arange(len(part)), np.arange(start, start + len(part))]
            ranks[start : start + len(part)] = (part > own[:, None] + 1e-6).sum(axis=1) + 1
        return {
            "accuracy_at_1": float((ranks == 1).mean()),
            f"mrr_at_{MRR_CUTOFF}": float(np.where(ranks <= MRR_CUTOFF, 1 / ranks, 0.0).mean()),
        }

    def reported_metrics(self, split: str) -> set[str] | None:
        """Return the names of all metrics of a split."""
        return {"loss", "accuracy", "accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}


def text_columns(records: Records) -> list[str]:
    """Return the columns anchor, positive and negatives; else all texts, in their order.

    **Raises:** UsageError for a table with fewer than two columns of texts.
    """
    table = records.tables[0]
    names = list(table.columns)
    if {"anchor", "positive"} <= set(names):
        negatives = [name for name in names if name.startswith("negative")]
        return ["anchor", "positive", *negatives]
    texts = [name for name in names if any(isinstance(c, str) for c in table.columns[name][:100])]
    if len(texts) < 2:
        raise UsageError(
            f"{table.origin} has the columns {', '.join(names)}: give anchor and positive (and "
            "negative), or texts in this order"
        )
    return texts
