"""Training of sparse encoders (SPLADE, CSR).

As in sentence-transformers' SpladeLoss, FLOPS regularizers of the vectors of queries and documents
are added to a loss of the dot products of these vectors (Formal et al., 2021). For a model with an
autoencoder, the errors of its reconstructions are added instead (Wen et al., 2025), as in CSRLoss.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import SparseArguments
from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError
from hfseq.modeling.sentence import (
    MODULES_KEY,
    ModuleWeights,
    SentenceConfig,
    SparseConfig,
    read_config,
)
from hfseq.modeling.sentence.auto_encoder import SparseAutoEncoder
from hfseq.modeling.sentence.config import Inputs, Run
from hfseq.nn import trees
from hfseq.nn.modules import BUFFERS
from hfseq.objectives import auto_encoder
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import Arrays, Batch, Params
from hfseq.objectives.chunks import Sharded
from hfseq.objectives.embedding import MRR_CUTOFF, ranking_metrics
from hfseq.objectives.retrieval import RetrievalObjective, document_scores
from hfseq.objectives.retrieval_losses import LossSum

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Default temperature of `--loss distill_kl_div`.
TEMPERATURE = 2.0
#: A warning is logged if more than this fraction of the weights is nonzero in this many successive
#: evaluations of the metrics.
DENSE_FRACTION, DENSE_REPORTS = 0.9, 5
#: The path of the statistics of an autoencoder in the collection of buffers.
STATISTICS = (MODULES_KEY, "auto_encoder", "last_nonzero")


class LatentVectors(NamedTuple):
    """The sparse vectors of an autoencoder.

    Attributes:
        vectors: `(rows, texts, hidden_dim)`.
        reconstruction_loss: The weighted errors of the reconstructed dense vectors.
    """

    vectors: jax.Array
    reconstruction_loss: jax.Array


class SparseTraining(RetrievalObjective):
    """Trains sparse vectors whose dot products rank documents.

    The regularizers are computed from means over the global batch. At the start of training, their
    weights grow quadratically from 0 to the values of the flags. If the model is a bi-encoder or
    has an autoencoder, an autoencoder of its vectors is trained instead of SPLADE.
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

    @classmethod
    def task_head(cls, config: PreTrainedConfig, **download: Any) -> str:
        """Returns the masked language model, or the model without a head for an autoencoder."""
        source = getattr(config, "name_or_path", None)
        saved = read_config(source, download) if source else None
        is_dense = isinstance(saved, SentenceConfig) or (
            isinstance(saved, SparseConfig) and saved.bi_encoder is not None
        )
        return "Model" if is_dense else cls.auto_class

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Adds an autoencoder to a bi-encoder. See :meth:`RetrievalObjective.prepare`."""
        config = model.sentence_config
        if isinstance(config, SentenceConfig):
            model.sentence_config = self.add_auto_encoder(model, config)
        super().prepare(model)

    def add_auto_encoder(self, model: FlaxPreTrainedModel, config: SentenceConfig) -> SparseConfig:
        """Returns the settings of a bi-encoder with a new autoencoder, as sentence-transformers.

        Raises:
            UsageError: Queries have other modules than documents.
        """
        if config.query_route is not None:
            raise UsageError(
                "a sparse encoder cannot be trained from a bi-encoder with a router: use a model "
                "that encodes queries and documents in the same way"
            )
        data = self.arguments
        size = config.features or model.text_config.hidden_size * len(config.pooling)
        encoder = SparseAutoEncoder.random(
            size, data.auto_encoder_size or 4 * size, data.auto_encoder_k or max(size // 4, 1)
        )
        logger.info(
            "adding an autoencoder with %d features, of which %d are kept",
            *(encoder.hidden_dim, encoder.k),
        )
        return SparseConfig(
            max_seq_length=config.max_seq_length,
            do_lower_case=config.do_lower_case,
            prompts=config.prompts,
            default_prompt_name=config.default_prompt_name,
            max_active_dims=encoder.k,
            bi_encoder=config,
            auto_encoder=encoder,
        )

    def make_config(self, model: FlaxPreTrainedModel, config: SparseConfig | None) -> SparseConfig:
        """Returns the settings of the model. The default for new models is SPLADE with max pooling.

        Raises:
            UsageError: An autoencoder has too few features.
        """
        config = config or SparseConfig()
        encoder, data = config.auto_encoder, self.arguments
        if encoder is None:
            if data.auto_encoder_size or data.auto_encoder_k:
                raise UsageError(
                    "--auto_encoder_size and --auto_encoder_k require a bi-encoder as "
                    "--model_name_or_path, that is, a directory with modules.json"
                )
            return config
        if data.auto_encoder_k:
            encoder = dataclasses.replace(encoder, k=data.auto_encoder_k)
            config = dataclasses.replace(
                config, auto_encoder=encoder, max_active_dims=data.auto_encoder_k
            )
        if data.auto_encoder_size not in (None, encoder.hidden_dim):
            raise UsageError(
                f"--auto_encoder_size {data.auto_encoder_size}: the autoencoder that is saved with "
                f"the model has {encoder.hidden_dim} features. Drop the flag"
            )
        if (required := max(4 * encoder.k, encoder.k_aux)) > encoder.hidden_dim:
            raise UsageError(
                f"the autoencoder has {encoder.hidden_dim} features, but its training uses the "
                f"{required} largest (4 times k={encoder.k}, k_aux={encoder.k_aux}): increase "
                "--auto_encoder_size or decrease --auto_encoder_k"
            )
        self.tags = (*self.tags[:-1], "csr")  # type: ignore[misc]  # per instance
        return config

    def embed(
        self, run: Run, inputs: Inputs, weights: ModuleWeights | None, task: str | None
    ) -> Any:
        """Computes sparse vectors, or the dense vectors that are the inputs of an autoencoder."""
        config = self.retrieval_config.bi_encoder or self.retrieval_config
        return config.embed(run, inputs, weights, task)

    def encode(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: Any,
        train: bool,
        extra: Params | None,
    ) -> tuple[Any, Params]:
        """Encodes all texts of a batch. With an autoencoder, returns :class:`LatentVectors`.

        The statistics of the autoencoder are updated in training, in the order of the columns.
        """
        vectors, extra = super().encode(model, params, batch, rngs, train, extra)
        encoder = self.retrieval_config.auto_encoder
        if encoder is None:
            return vectors, extra
        buffers = trees.flatten(extra[BUFFERS])
        latents, loss, buffers[STATISTICS] = auto_encoder.reconstruct(
            encoder,
            vectors,
            params[MODULES_KEY]["auto_encoder"],
            buffers[STATISTICS],
            batch["valid"],
            auxiliary_weight=self.arguments.csr_beta,
            train=train,
        )
        return LatentVectors(latents, loss), {**extra, BUFFERS: trees.unflatten(buffers)}

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
        vectors: Any,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss without further terms from vectors, `(rows, texts, features)`."""
        data, valid = self.arguments, batch["valid"]
        if isinstance(vectors, LatentVectors):
            vectors = vectors.vectors
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
        vectors: Any,
        batch: Batch,
        train: bool,
        totals: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Adds the regularizers, or the errors of an autoencoder.

        In evaluation, the regularizers always have their full weights.
        """
        data, valid = self.arguments, batch["valid"]
        if isinstance(vectors, LatentVectors):
            totals |= self.report(result, vectors.vectors, valid)
            error = vectors.reconstruction_loss * result.count
            return data.csr_gamma * result.total + error, totals
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
        return result.total + penalty * result.count, totals | self.report(result, vectors, valid)

    @staticmethod
    def report(result: LossSum, vectors: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        """Returns the sums of the loss without further terms and of the nonzero weights."""
        active = jnp.where(valid[:, None], (vectors != 0).sum(-1), 0).astype(jnp.float32)
        return {
            "base_loss": jax.lax.stop_gradient(result.total),
            "query_active_dims": active[:, 0].sum(),
            "document_active_dims": active[:, 1:].mean(1).sum(),
        }

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

    def row_outputs(self, vectors: Any) -> dict[str, jax.Array]:
        """Returns the vectors of anchors and positives."""
        if isinstance(vectors, LatentVectors):
            vectors = vectors.vectors
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
