"""Training of sparse encoders (SPLADE).

As in sentence-transformers' SpladeLoss, FLOPS regularizers of the vectors of queries and documents
are added to a loss of the dot products of these vectors (Formal et al., 2021).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import SparseArguments
from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError
from hfseq.modeling.sentence import ModuleWeights, SparseConfig
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import Arrays, Batch
from hfseq.objectives.chunks import Sharded
from hfseq.objectives.embedding import MRR_CUTOFF, ranking_metrics
from hfseq.objectives.retrieval import RetrievalObjective, document_scores
from hfseq.objectives.retrieval_losses import LossSum

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Default temperature of `--loss distill_kl_div`.
TEMPERATURE = 2.0
#: A warning is logged if more than this fraction of the weights is nonzero in this many successive
#: evaluations of the metrics.
DENSE_FRACTION, DENSE_REPORTS = 0.9, 5


class SparseTraining(RetrievalObjective):
    """Trains sparse vectors whose dot products rank documents.

    The regularizers are computed from means over the global batch. At the start of training, their
    weights grow quadratically from 0 to the values of the flags.
    """

    name = "sparse_encoder"
    data_arguments = SparseArguments
    auto_class = "ForMaskedLM"
    pipeline_tag = "feature-extraction"
    tags = ("sentence-transformers", "sparse-encoder", "sparse", "splade")
    config_class = SparseConfig

    arguments: SparseArguments

    def setup(self) -> None:
        """Selects the columns, and sets the names of the sums for the metrics."""
        super().setup()
        self.sums = (*self.sums, "base_loss", "document_active_dims", "query_active_dims")  # type: ignore[misc]
        self._dense_reports = 0

    def make_config(self, model: FlaxPreTrainedModel, config: SparseConfig | None) -> SparseConfig:
        """Returns the settings of the model. The default for new models is SPLADE with max pooling.

        Raises:
            UsageError: The model has a sparse autoencoder.
        """
        if config is not None and config.auto_encoder is not None:
            raise UsageError(
                "training only supports sparse encoders with a masked language model (SPLADE), but "
                "--model_name_or_path has a SparseAutoEncoder (CSR)"
            )
        return config or SparseConfig()

    @property
    def encodes_together(self) -> bool:
        """Whether queries and documents are encoded in the same way."""
        return self.retrieval_config.query_encoder is None

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Adds the number of the training step, on which the regularizers depend."""
        batch = super().collate(rows, random, groups)
        return batch | {"step": np.full(len(batch["valid"]), random.step, np.int32)}

    def compute_loss(
        self,
        name: str,
        vectors: jax.Array,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss without regularizers from vectors, `(rows, texts, vocab_size)`."""
        data, valid = self.arguments, batch["valid"]
        if name == "margin_mse":
            return losses.margin_mse(document_scores(vectors), batch["labels"], valid)
        if name == "distill_kl_div":
            temperature = data.temperature or TEMPERATURE
            return losses.distill_kl_div(
                document_scores(vectors), batch["labels"], valid, temperature=temperature
            )
        options: dict[str, Any] = self.ranking_options | {"scale": data.scale or 1.0}
        if name == "multiple_negatives_symmetric_ranking":
            options |= {"directions": losses.SYMMETRIC, "partition_mode": "per_direction"}
        return losses.multiple_negatives_ranking(
            vectors, valid, similarity="dot", sharded=sharded, **options
        )

    def add_terms(
        self,
        result: LossSum,
        vectors: jax.Array,
        batch: Batch,
        train: bool,
        totals: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Adds the regularizers. In evaluation, they always have their full weights."""
        data, valid = self.arguments, batch["valid"]
        queries, documents = vectors[:, :1], vectors[:, 1:]
        penalty = data.document_regularizer_weight * losses.flops(
            documents, valid, data.document_regularizer_threshold
        )
        if self.encodes_together:
            penalty += data.query_regularizer_weight * losses.flops(
                queries, valid, data.query_regularizer_threshold
            )
        if train:
            penalty *= warmup(batch["step"][0], self.total_steps, data.regularizer_warmup_ratio)
        active = jnp.where(valid[:, None], (vectors != 0).sum(-1), 0).astype(jnp.float32)
        totals |= {
            "base_loss": jax.lax.stop_gradient(result.total),
            "query_active_dims": active[:, 0].sum(),
            "document_active_dims": active[:, 1:].mean(1).sum(),
        }
        return result.total + penalty * result.count, totals

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss with and without regularizers, and the numbers of nonzero weights."""
        count = max(totals["count"], 1)
        names = ("base_loss", "query_active_dims", "document_active_dims")
        metrics = super().metrics(totals) | {name: totals[name] / count for name in names}
        is_dense = metrics["document_active_dims"] > DENSE_FRACTION * self.config.vocab_size
        self._dense_reports = self._dense_reports + 1 if is_dense else 0
        if self._dense_reports == DENSE_REPORTS:
            logger.warning(
                "on average, %d of the %d weights of a document are not zero, so the vectors are "
                "not sparse: increase --document_regularizer_weight, or start from another model",
                *(round(metrics["document_active_dims"]), self.config.vocab_size),
            )
        return metrics

    def row_outputs(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """Returns the vectors of anchors and positives."""
        return {"anchors": vectors[:, 0], "positives": vectors[:, 1]}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Ranks each positive among all positives of the split."""
        return ranking_metrics(np.asarray(rows["anchors"]), np.asarray(rows["positives"]))

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        names = {"loss", "base_loss", "query_active_dims", "document_active_dims"}
        names |= {"accuracy"} if "correct" in self.sums else set()
        return names | {"accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}


def warmup(step: jax.Array, total_steps: int, ratio: float) -> jax.Array:
    """Returns the factor of the regularizers in a step. It grows quadratically from 0 to 1.

    Args:
        step: Number of the training step, starting at 0.
        total_steps: Number of training steps.
        ratio: Fraction of the steps after which the factor is 1.
    """
    steps = max(int(total_steps * ratio), 1)
    return jnp.square(jnp.minimum(step / steps, 1.0)) if ratio else jnp.ones(())
