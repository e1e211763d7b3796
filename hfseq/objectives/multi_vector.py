"""Training of multi-vector encoders with late interaction (ColBERT).

The losses are those of sentence-transformers' MultiVectorEncoder. They are computed from MaxSim
scores (Khattab and Zaharia, 2020).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import MultiVectorArguments
from hfseq.data.retrieval import RetrievalRows
from hfseq.modeling.sentence import (
    ModuleWeights,
    MultiVectorConfig,
    QueryExpansion,
    random_projection,
)
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import Arrays, Batch, RowsAndStats
from hfseq.objectives.chunks import Sharded
from hfseq.objectives.embedding import MRR_CUTOFF, rank_summary
from hfseq.objectives.retrieval import RetrievalObjective, TokenVectors
from hfseq.objectives.retrieval_losses import LossSum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hfseq.modeling import FlaxPreTrainedModel

#: Default size of token vectors and default query length of new models.
FEATURES, QUERY_LENGTH = 128, 32


class MultiVector(RetrievalObjective):
    """Trains token vectors whose MaxSim scores rank documents."""

    name = "multi_vector"
    data_arguments = MultiVectorArguments
    pipeline_tag = "sentence-similarity"
    tags = ("sentence-transformers", "multi-vector", "ColBERT", "late-interaction")
    config_class = MultiVectorConfig

    arguments: MultiVectorArguments

    def setup(self) -> None:
        """Selects the columns."""
        super().setup()
        # Maximum numbers of tokens of queries and documents, to which token vectors are padded.
        self.max_widths = [1, 1]

    def make_config(
        self, model: FlaxPreTrainedModel, config: MultiVectorConfig | None
    ) -> MultiVectorConfig:
        """Returns the settings of the model. A new model has a random projection."""
        data = self.arguments
        changes: dict[str, Any] = {}
        prompts = (data.query_prompt, data.document_prompt)
        if config is None:
            length = data.query_length or QUERY_LENGTH
            config = MultiVectorConfig(
                dense=(
                    random_projection(
                        model.text_config.hidden_size, data.embedding_size or FEATURES
                    ),
                ),
                query_length=None if data.query_expansion else length,
                query_expansion=QueryExpansion(length) if data.query_expansion else None,
            )
        elif data.query_length and config.query_expansion is not None:
            expansion = dataclasses.replace(config.query_expansion, length=data.query_length)
            changes["query_expansion"] = expansion
        elif data.query_length:
            changes["query_length"] = data.query_length
        if data.document_length:
            changes["document_length"] = data.document_length
        if any(prompts):
            changes["markers"] = tuple(filter(None, prompts))
        config = dataclasses.replace(config, **changes)
        config.register_markers(self.tokenizer)
        return config

    @property
    def encodes_together(self) -> bool:
        """Whether queries and documents are encoded in the same way."""
        return False

    def prompt(self, task: str) -> str:
        """Returns the marker that precedes the texts of a task, "query" or "document".

        It is saved with the model.
        """
        return self.retrieval_config.prompts.get(task, "")

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the texts of a split."""
        rows, statistics = super().make_rows(splits, split, length)
        assert isinstance(rows, RetrievalRows) and rows.queries is not None
        widths = (rows.queries.widths[-1], rows.documents.widths[-1])
        self.max_widths = [max(pair) for pair in zip(self.max_widths, widths, strict=True)]
        return rows, statistics

    def combine(self, queries: Any, documents: Any) -> Any:
        """Returns the token vectors of queries and those of documents, unchanged."""
        return TokenVectors(*queries), TokenVectors(*documents)

    def compute_loss(
        self,
        name: str,
        vectors: Any,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss from the token vectors of queries and documents."""
        queries, documents = vectors
        data, valid = self.arguments, batch["valid"]
        mean = self.retrieval_config.similarity_fn_name == "meanmaxsim"
        query, query_mask = queries.vectors[:, 0], queries.mask[:, 0]
        if name == "multiple_negatives_ranking":
            # The documents are all positives, then the first negatives of all rows, and so on.
            flat = [part.swapaxes(0, 1).reshape(-1, *part.shape[2:]) for part in documents]
            scores = losses.maxsim(query, flat[0], query_mask, flat[1], length_normalize=mean)
            return losses.in_batch_ranking(scores, valid, scale=data.scale or 1.0)
        scores = losses.maxsim_pairwise(
            query, documents.vectors, query_mask, documents.mask, length_normalize=mean
        )
        if name == "margin_mse":
            return losses.margin_mse(scores, batch["labels"], valid)
        temperature = data.temperature or 1.0
        return losses.distill_kl_div(scores, batch["labels"], valid, temperature=temperature)

    def row_outputs(self, vectors: Any) -> dict[str, jax.Array]:
        """Returns the token vectors of queries and positives, padded to the maximum width."""
        outputs = {}
        for name, part, width in zip(("query", "positive"), vectors, self.max_widths, strict=True):
            hidden = (part.mask[:, 0] == 0)[..., None]
            tokens = jnp.where(hidden, 0.0, part.vectors[:, 0])
            padding = width - tokens.shape[1]
            outputs[name] = jnp.pad(tokens, ((0, 0), (0, padding), (0, 0)))
            outputs[f"{name}_mask"] = jnp.pad(part.mask[:, 0], ((0, 0), (0, padding)))
        return outputs

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Ranks each positive among all positives of the split by MaxSim."""
        names = ("query", "positive", "query_mask", "positive_mask")
        query, positive, query_mask, positive_mask = (np.asarray(rows[name]) for name in names)
        documents = positive.reshape(-1, positive.shape[-1])
        hidden = np.where(positive_mask != 0, 0.0, -np.inf).astype(np.float32)
        is_empty = ~(positive_mask != 0).any(1)
        ranks = np.empty(len(query), np.int64)
        for row, (tokens, mask) in enumerate(zip(query, query_mask, strict=True)):
            products = (tokens[mask != 0] @ documents.T).reshape(-1, *positive.shape[:2])
            scores = (products + hidden).max(-1).sum(0)
            scores = np.where(is_empty, losses.EMPTY_SCORE, scores)
            ranks[row] = (scores > scores[row] + 1e-6).sum() + 1
        return rank_summary(ranks)

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        names = {"loss", "accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}
        return names | ({"accuracy"} if "correct" in self.sums else set())
