"""Losses of rerankers, on the scores of pairs of a query and a document.

The losses have the formulas and defaults of sentence-transformers 6's classes for `CrossEncoder`.
Listwise losses have scores, labels and a mask `(queries, documents)`. Entries outside of the mask,
and queries without any entry, only pad the batch: they do not count and receive no gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from hfseq.data.batches import IGNORE_INDEX
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.retrieval_losses import LOG_ZERO, LossSum, weighted_sum

#: Weighting schemes of LambdaLoss (Wang et al., 2018).
Weighting = Literal["none", "ndcg_loss1", "ndcg_loss2", "lambda_rank", "ndcg_loss2pp"]


def binary_cross_entropy(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, *, pos_weight: float = 1.0
) -> LossSum:
    """Returns the binary cross-entropy with labels in [0, 1] (``BinaryCrossEntropyLoss``).

    Args:
        logits: Scores before the sigmoid, `(rows,)`.
        labels: Labels, `(rows,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        pos_weight: Weight of the positive term. The number of negatives per positive is a common
            value.
    """
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return weighted_sum(-(pos_weight * labels * positive + (1 - labels) * negative), valid)


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the cross-entropy of class IDs (``CrossEntropyLoss``).

    Args:
        logits: `(rows, num_labels)`.
        labels: Class IDs, `(rows,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
    """
    return LossSum(*cross_entropy(logits, jnp.where(valid, labels, IGNORE_INDEX)))


def mse(scores: jax.Array, labels: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the squared error of the scores `(rows,)` (``MSELoss``)."""
    return weighted_sum(jnp.square(scores - labels), valid)


def candidate_ranking(
    logits: jax.Array,
    mask: jax.Array,
    *,
    scale: float = 10.0,
    activation: Literal["sigmoid", "identity"] = "sigmoid",
) -> LossSum:
    """Ranks the positive first among the candidates (``MultipleNegativesRankingLoss``).

    Args:
        logits: Scores of the candidates, `(queries, candidates)`. The first is the positive.
        mask: Mask of the entries that are candidates (not padding), `(queries, candidates)`.
        scale: Factor of the activated scores.
        activation: Function that is applied to the scores first. The sigmoid limits the difference
            of two candidates to ``scale``.
    """
    scores = jax.nn.sigmoid(logits) if activation == "sigmoid" else logits
    scores = jnp.where(mask, scores * scale, LOG_ZERO)
    labels = jnp.where(mask[:, 0], 0, IGNORE_INDEX)
    return LossSum(*cross_entropy(scores, labels))


def lambda_loss(
    scores: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    weighting: Weighting = "ndcg_loss2pp",
    k: int | None = None,
    sigma: float = 1.0,
    mu: float = 10.0,
    eps: float = 1e-10,
    reduction_log: Literal["natural", "binary"] = "binary",
) -> LossSum:
    """Returns the mean loss of pairs of documents with different labels (``LambdaLoss``).

    A pair counts if one of its documents is among the first k. Source: Wang et al. (2018).

    Args:
        scores: `(queries, documents)`.
        labels: Relevance, at least 0, `(queries, documents)`.
        mask: Mask of the entries that are documents (not padding), `(queries, documents)`.
        weighting: The weighting scheme. "none" is RankNet.
        k: Cutoff of NDCG. Default: all documents.
        sigma: Factor of score differences.
        mu: Weight of "ndcg_loss2" in "ndcg_loss2pp".
        eps: Lower bound of the ideal DCG.
        reduction_log: Base of the logarithm.
    """
    width = scores.shape[1]
    k = min(k or width, width)
    order = jnp.argsort(jnp.where(mask, -scores, jnp.inf), axis=1)
    scores, labels, mask = (jnp.take_along_axis(x, order, 1) for x in (scores, labels, mask))
    labels = jnp.where(mask, labels.astype(jnp.float32), 0.0)
    rank = jnp.arange(1, width + 1)
    discount = jnp.log2(1.0 + rank)
    relevance = jnp.exp2(jnp.maximum(labels, 0.0)) - 1
    ideal = (-jnp.sort(-relevance, axis=1) / discount)[:, :k].sum(1)
    gain = relevance / jnp.maximum(ideal, eps)[:, None]
    gain_differences = jnp.abs(gain[:, :, None] - gain[:, None])

    def inverse_discount_differences(ranks: jax.Array, other_ranks: jax.Array) -> jax.Array:
        return jnp.abs(1 / jnp.log2(1.0 + ranks) - 1 / jnp.log2(1.0 + other_ranks))

    distance = jnp.abs(rank[:, None] - rank)
    near = inverse_discount_differences(jnp.maximum(distance, 1), distance + 1)
    ndcg2 = jnp.where(distance > 0, near, 0.0) * gain_differences
    lambda_rank = inverse_discount_differences(rank[:, None], rank) * gain_differences
    weights = {
        "none": jnp.ones(()),
        "ndcg_loss1": (gain / discount)[:, :, None],
        "ndcg_loss2": ndcg2,
        "lambda_rank": lambda_rank,
        "ndcg_loss2pp": mu * ndcg2 + lambda_rank,
    }[weighting]
    counted = mask[:, :, None] & mask[:, None]
    if weighting != "ndcg_loss1":
        counted &= labels[:, :, None] > labels[:, None]
    counted &= (rank[:, None] <= k) | (rank <= k)
    differences = jnp.where(counted, scores[:, :, None] - scores[:, None], 0.0)
    losses = -weights * jax.nn.log_sigmoid(sigma * differences)
    losses = losses / math.log(2) if reduction_log == "binary" else losses
    return LossSum(jnp.where(counted, losses, 0.0).sum(), counted.sum())


def list_net(scores: jax.Array, labels: jax.Array, mask: jax.Array) -> LossSum:
    """Returns the cross-entropy of the softmax of scores and of labels (``ListNetLoss``).

    The arguments have the same meaning as in :func:`lambda_loss`. Source: Cao et al. (2007).
    """
    target = jax.nn.softmax(jnp.where(mask, labels, LOG_ZERO))
    log_probabilities = jax.nn.log_softmax(jnp.where(mask, scores, LOG_ZERO))
    losses = -jnp.where(mask, target * log_probabilities, 0.0).sum(1)
    return weighted_sum(losses, mask.any(1))


def list_mle(
    scores: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    weighted: bool = False,
    respect_input_order: bool = True,
    eps: float = 1e-10,
) -> LossSum:
    """Returns the negative log-likelihood of a ranking (``ListMLELoss`` or ``PListMLELoss``).

    Entries outside of the mask must be at the end of a row. Sources: Xia et al. (2008) and, for the
    weights, Lan et al. (2014).

    Args:
        scores: `(queries, documents)`.
        labels: Relevance, `(queries, documents)`.
        mask: Mask of the entries that are documents (not padding), `(queries, documents)`.
        weighted: Whether rank i of n has the weight 2^(n − i) − 1, divided by the sum.
        respect_input_order: Whether the order of the documents is the ranking. Otherwise, the
            documents are sorted by label.
        eps: Added to the sum of weights.
    """
    if not respect_input_order:
        order = jnp.argsort(jnp.where(mask, -labels, jnp.inf), axis=1)
        scores, mask = (jnp.take_along_axis(x, order, 1) for x in (scores, mask))
    hidden = jnp.where(mask, scores, LOG_ZERO)
    log_normalizer = jax.lax.cumlogsumexp(hidden, axis=1, reverse=True)
    terms = jnp.where(mask, scores - log_normalizer, 0.0)
    if weighted:
        count = mask.sum(1, keepdims=True)
        scale = jnp.maximum(count - 127, 0)  # 2**127 is the largest power in float32
        ranks = jnp.arange(1, scores.shape[1] + 1)
        weights = jnp.exp2((count - ranks - scale).astype(jnp.float32))
        weights = jnp.where(mask, weights - jnp.exp2(-scale.astype(jnp.float32)), 0.0)
        terms = terms * (weights / (weights.sum(1, keepdims=True) + eps))
    return weighted_sum(-terms.sum(1), mask.any(1))


def adr_mse(
    scores: jax.Array, labels: jax.Array, mask: jax.Array, *, alpha: float = 1.0
) -> LossSum:
    """Returns the discounted squared error of approximate ranks (``ADRMSELoss``).

    Args:
        scores: `(queries, documents)`.
        labels: Relevance, `(queries, documents)`. Equal labels share their mean rank.
        mask: Mask of the entries that are documents (not padding), `(queries, documents)`.
        alpha: Factor of score differences.
    """
    other = mask[:, None]
    greater = ((labels[:, None] > labels[:, :, None]) & other).sum(-1)
    equal = ((labels[:, None] == labels[:, :, None]) & other).sum(-1)
    ranks = greater + (equal + 1) / 2
    above = jax.nn.sigmoid(alpha * (scores[:, None] - scores[:, :, None]))
    approximate = 0.5 + jnp.where(other, above, 0.0).sum(-1)
    errors = jnp.square(ranks - approximate) / jnp.log2(1 + ranks)
    return weighted_sum(errors, mask)
