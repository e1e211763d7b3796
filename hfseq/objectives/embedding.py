"""Training of text embeddings (bi-encoders).

The default loss is InfoNCE over the texts of the global batch (van den Oord et al., 2018; Henderson
et al., 2017), which sentence-transformers calls MultipleNegativesRankingLoss. Every loss except the
softmax loss can be combined with MatryoshkaLoss (Kusupati et al., 2022).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.arguments import EmbeddingArguments
from hfseq.data.retrieval import class_labels
from hfseq.errors import UsageError
from hfseq.modeling.sentence import (
    Dense,
    ModuleWeights,
    SentenceConfig,
    SentenceEncoder,
    l2_normalize,
)
from hfseq.modeling.sentence.bi_encoder import QueryRoute
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import Arrays, Batch, Objective
from hfseq.objectives.chunks import Sharded
from hfseq.objectives.ranking_losses import softmax_cross_entropy
from hfseq.objectives.retrieval import RetrievalObjective, document_scores
from hfseq.objectives.retrieval_losses import LossSum
from hfseq.objectives.retrieval_metrics import (
    pair_classification_metrics,
    similarity_metrics,
    triplet_accuracy,
)

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: In the mean reciprocal rank, positives with a larger rank than this count as 0.
MRR_CUTOFF = 10
#: Losses for which evaluation only reports the loss and, if there is one, its accuracy.
UNRANKED_LOSSES = ("mse", "embed_distill", "softmax")
#: Number of texts that the guide model of the GIST loss encodes at a time.
GUIDE_BATCH_SIZE = 128


class Embedding(RetrievalObjective):
    """Trains embeddings of texts.

    With the default loss, each anchor becomes more similar to its own positive than to all other
    texts. Evaluation ranks each anchor's positive among the positives of the whole split. If pairs
    have gold scores, it computes their correlation with the similarities instead.
    """

    name = "embedding"
    data_arguments = EmbeddingArguments
    pipeline_tag = "sentence-similarity"
    tags = ("sentence-transformers", "feature-extraction")
    config_class = SentenceConfig
    #: Seed of the initial classifier of the softmax loss.
    CLASSIFIER_SEED = 0

    arguments: EmbeddingArguments

    def setup(self) -> None:
        """Selects the columns and, for the softmax loss, numbers the classes of the labels."""
        super().setup()
        if self.loss_name == "softmax":
            self.classes = {name: number for number, name in enumerate(class_labels(self.splits))}
            if len(self.classes) < 2:
                raise UsageError(
                    "--loss softmax requires at least two classes, but all labels are "
                    f"{next(iter(self.classes), None)!r}"
                )

    def add_part(self, number: int, part: Objective) -> None:
        """Adds a dataset of ``--train_mixture``. Only the first may have the softmax loss."""
        super().add_part(number, part)
        if self.part_losses[number] == "softmax":
            raise UsageError(
                f"--train_mixture, dataset {number + 1}: only the first dataset can have the loss "
                "softmax, because its classes determine the classifier"
            )

    def make_config(
        self, model: FlaxPreTrainedModel, config: SentenceConfig | None
    ) -> SentenceConfig:
        """Returns the settings of the model, which the flags can change."""
        data, config = self.arguments, config or SentenceConfig()
        if config.query_route is not None and config.query_route.encoder is not None:
            config = dataclasses.replace(
                config, query_route=self.prepare_queries(model, config, config.query_route)
            )
        config = dataclasses.replace(
            config,
            pooling=config.pooling if data.pooling is None else (data.pooling,),
            normalize=data.normalize,
        )
        num_features = config.features or model.text_config.hidden_size * len(config.pooling)
        if too_large := [dim for dim in data.dims if dim > num_features]:
            raise UsageError(
                f"--matryoshka_dims {too_large[0]} exceeds the embedding size of the model, "
                f"{num_features}"
            )
        self.num_features = num_features
        if self.loss_name == "softmax":
            classifier = Dense.random(3 * num_features, len(self.classes), self.CLASSIFIER_SEED)
            return dataclasses.replace(config, classifier=classifier)
        return dataclasses.replace(config, classifier=None)

    def prepare_queries(
        self, model: FlaxPreTrainedModel, config: SentenceConfig, route: QueryRoute
    ) -> QueryRoute:
        """Gives the transformer of queries the precision of that of documents.

        Raises:
            UsageError: The vectors have different sizes, or the precision has statistics.
        """
        encoder = route.encoder
        assert encoder is not None
        sizes = [
            part.features or transformer.text_config.hidden_size * len(part.pooling)
            for part, transformer in ((encoder.config, encoder.model), (config, model))
        ]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"the vectors of queries have {sizes[0]} features, but those of documents have "
                f"{sizes[1]}"
            )
        query_model = encoder.model.with_precision(model.precision)
        if query_model.extra_shape_tree:
            raise UsageError(
                f"--precision {model.precision.name} does not support routers with two transformers"
            )
        query_encoder = SentenceEncoder(query_model, encoder.tokenizer, encoder.config)
        return dataclasses.replace(route, encoder=query_encoder)

    @property
    def encodes_together(self) -> bool:
        """Whether queries and documents are encoded in the same way."""
        return self.retrieval_config.query_route is None

    def make_arrays(
        self, split: str, examples: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[str]]
    ) -> dict[str, np.ndarray]:
        """Returns the labels and, for the GIST loss, the embeddings of the guide model."""
        arrays = super().make_arrays(split, examples, texts)
        if self.loss_name in ("mse", "embed_distill"):
            size = arrays["labels"].shape[-1]
            if size != self.num_features:
                raise UsageError(
                    f"--loss {self.loss_name}: the teacher's vectors in the label column have "
                    f"{size} features, but those of the model have {self.num_features}. Use a "
                    "teacher with the same embedding size"
                )
        if self.loss_name == "gist":
            arrays["guide"] = np.stack([self._guide(column) for column in texts], axis=1)
        return arrays

    def _guide(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the guide model's embeddings of texts, float32 `(texts, features)`."""
        guide = self.__dict__.get("_guide_encoder")
        if guide is None:
            logger.info("computing embeddings with --guide_model %s", self.arguments.guide_model)
            guide = SentenceEncoder.from_pretrained(str(self.arguments.guide_model))
            self.__dict__["_guide_encoder"] = guide
        return guide.encode(texts, batch_size=GUIDE_BATCH_SIZE)

    def compute_loss(
        self,
        name: str,
        vectors: jax.Array,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss from embeddings, `(rows, texts, features)`."""
        labels = batch.get("labels")
        dims = self.arguments.dims
        if name == "softmax":
            return self._softmax(vectors, labels, batch["valid"], weights)

        def loss(vectors: jax.Array, labels: Any) -> LossSum:
            return self._loss(name, vectors, labels, batch, sharded)

        if not dims:
            return loss(vectors, labels)
        return losses.matryoshka(loss, vectors, labels, dims, self.arguments.dim_weights or None)

    def _softmax(
        self, vectors: jax.Array, labels: Any, valid: jax.Array, weights: ModuleWeights | None
    ) -> LossSum:
        """Returns the cross-entropy of the predicted classes of pairs (``SoftmaxLoss``)."""
        classifier, features = self.retrieval_config.classifier, losses.pair_features(vectors)
        logits = classifier(features, weights["classifier"] if weights else None)
        correct = (valid & (logits.argmax(-1) == labels)).sum()
        return dataclasses.replace(softmax_cross_entropy(logits, labels, valid), correct=correct)

    def _loss(
        self, name: str, vectors: jax.Array, labels: Any, batch: Batch, sharded: Sharded | None
    ) -> LossSum:
        data, valid = self.arguments, batch["valid"]

        def options(**values: Any) -> dict[str, Any]:
            return {key: value for key, value in values.items() if value is not None}

        scale = options(scale=data.scale)
        triplets = options(margin=data.margin, distance=data.distance_metric)
        if name == "multiple_negatives_ranking":
            return losses.multiple_negatives_ranking(
                vectors, valid, sharded=sharded, **scale, **self.ranking_options
            )
        if name == "multiple_negatives_symmetric_ranking":
            symmetric = {"directions": losses.SYMMETRIC, "partition_mode": "per_direction"}
            return losses.multiple_negatives_ranking(
                vectors, valid, sharded=sharded, **scale, **self.ranking_options | symmetric
            )
        if name == "gist":
            return losses.gist(
                vectors,
                batch["guide"],
                valid,
                margin_strategy=data.margin_strategy,
                chunk_rows=data.mini_batch_size,
                sharded=sharded,
                **options(margin=data.margin, temperature=data.temperature),
            )
        if name in ("cosent", "angle"):
            return losses.cosent(vectors, labels, valid, angle=name == "angle", **scale)
        if name == "cosine_similarity":
            return losses.cosine_similarity_loss(vectors, labels, valid)
        if name == "contrastive":
            return losses.contrastive(vectors, labels, valid, **triplets)
        if name == "online_contrastive":
            return losses.online_contrastive(vectors, labels, valid, **triplets)
        if name == "triplet":
            return losses.triplet(vectors, valid, **triplets)
        if name == "margin_mse":
            return losses.margin_mse(document_scores(vectors), labels, valid)
        if name == "distill_kl_div":
            temperature = options(temperature=data.temperature)
            return losses.distill_kl_div(document_scores(vectors), labels, valid, **temperature)
        if name in ("mse", "embed_distill"):
            metric: Any = "mse" if name == "mse" else data.distance_metric or "cosine"
            return losses.embed_distill(vectors, labels, valid, metric=metric)
        batch_triplets = {
            "batch_all_triplet": losses.batch_all_triplet,
            "batch_hard_triplet": losses.batch_hard_triplet,
            "batch_semi_hard_triplet": losses.batch_semi_hard_triplet,
        }
        return batch_triplets[name](vectors[:, 0], labels, valid, **triplets)

    def row_outputs(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """Returns the embeddings of the first, second and third text of each example."""
        embeddings = l2_normalize(vectors)
        names = ("anchors", "positives", "negatives")
        return dict(zip(names, embeddings[:, :3].swapaxes(0, 1), strict=False))

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Ranks each positive among all positives of the split, or correlates similarities.

        The rank of a positive is not affected by texts that are equally similar to the anchor, such
        as copies of the positive.
        """
        anchors, positives = (rows.get(name) for name in ("anchors", "positives"))
        if anchors is None or positives is None or self.loss_name in UNRANKED_LOSSES:
            return {}
        anchors, positives = np.asarray(anchors), np.asarray(positives)
        if self.spec.labels in ("score", "binary"):
            labels = self.labels[split][: len(anchors)]
            similarities = (anchors * positives).sum(1)
            metrics = similarity_metrics(similarities, labels)
            if self.spec.labels == "binary":
                classified = pair_classification_metrics(similarities, labels)
                metrics |= {name: classified[name] for name in ("accuracy", "f1", "ap")}
            return {f"{name}_cosine": value for name, value in metrics.items()}
        metrics = ranking_metrics(anchors, positives)
        if "negatives" in rows:
            negatives = np.asarray(rows["negatives"])
            similarities = [(anchors * texts).sum(1) for texts in (positives, negatives)]
            metrics["triplet_accuracy"] = triplet_accuracy(*similarities)
        return metrics

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        names = {"loss"} | ({"accuracy"} if "correct" in self.sums else set())
        texts = len(self.columns[split].texts) if split in self.columns else 2
        if self.loss_name in UNRANKED_LOSSES or texts < 2:
            return names
        if self.spec.labels in ("score", "binary"):
            binary = {"accuracy_cosine", "f1_cosine", "ap_cosine"}
            names |= {"pearson_cosine", "spearman_cosine"}
            return names | (binary if self.spec.labels == "binary" else set())
        names |= {"accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}
        return names | ({"triplet_accuracy"} if texts > 2 else set())


def ranking_metrics(anchors: np.ndarray, positives: np.ndarray) -> dict[str, float]:
    """Ranks the positive of each anchor among all positives, by their dot products.

    Args:
        anchors: Vectors of the anchors, `(rows, features)`.
        positives: Vectors of the positives, `(rows, features)`.

    Returns:
        "accuracy_at_1", the fraction of positives with rank 1, and the mean reciprocal rank.
    """
    ranks = np.empty(len(anchors), np.int64)
    for start in range(0, len(anchors), 1024):
        similarities = anchors[start : start + 1024] @ positives.T
        positive_similarities = similarities[
            np.arange(len(similarities)), np.arange(start, start + len(similarities))
        ]
        ranks[start : start + len(similarities)] = (
            similarities > positive_similarities[:, None] + 1e-6
        ).sum(axis=1) + 1
    return rank_summary(ranks)


def rank_summary(ranks: np.ndarray) -> dict[str, float]:
    """Returns the fraction of ranks that are 1, and the mean reciprocal rank."""
    return {
        "accuracy_at_1": float((ranks == 1).mean()),
        f"mrr_at_{MRR_CUTOFF}": float(np.where(ranks <= MRR_CUTOFF, 1 / ranks, 0.0).mean()),
    }
