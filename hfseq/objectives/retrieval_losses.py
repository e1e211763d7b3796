"""Losses on the vectors of texts, for bi-encoders, sparse encoders and late interaction.

The losses have the formulas and defaults of the classes of sentence-transformers 6 that their
docstrings name. All of them are computed in float32.

Most losses are functions of vectors `(rows, texts, features)`. Each row is an example. Its texts
are in the order of the columns, for example anchor, positive and negatives. A boolean array
``valid``, `(rows,)`, is true for examples, and false for rows that only pad the batch. Padding rows
do not count in the loss, are not compared with other rows, and receive no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from hfseq.data.batches import IGNORE_INDEX
from hfseq.modeling.sentence.pooling import l2_normalize
from hfseq.objectives.chunks import Sharded, map_chunks
from hfseq.objectives.cross_entropy import cross_entropy

Similarity = Literal["cosine", "dot"]
Distance = Literal["euclidean", "cosine", "manhattan"]
Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]

#: The directions of the symmetric loss of CLIP. `ALL_DIRECTIONS` are those of the improved
#: contrastive loss of GTE (Li et al., 2023).
SYMMETRIC: tuple[Direction, ...] = ("query_to_doc", "doc_to_query")
ALL_DIRECTIONS: tuple[Direction, ...] = (
    "query_to_doc",
    "query_to_query",
    "doc_to_query",
    "doc_to_doc",
)
#: A finite replacement for the logarithm of zero. With -inf, gradients would be NaN.
LOG_ZERO = -1e30


@dataclass(frozen=True)
class LossSum:
    """A mean loss, as a sum and the number of its terms.

    Both can be added over micro-batches and devices, so that the mean is exact.

    Attributes:
        total: The sum, float32. The loss is ``total / max(count, 1)``.
        count: The number of terms.
        correct: For losses that rank candidates, the number of anchors whose positive has the
            largest score.
    """

    total: jax.Array
    count: jax.Array
    correct: jax.Array | None = None

    @property
    def mean(self) -> jax.Array:
        """The loss."""
        return self.total / jnp.maximum(self.count, 1)


def per_batch(loss: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the `LossSum` of a loss that has a single value for the whole batch, such as CoSENT.

    In means over batches, the value has the weight of the number of examples.
    """
    count = valid.sum()
    return LossSum(loss * count, count)


def weighted_sum(values: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the `LossSum` of a loss with one value per row, `(rows,)`."""
    return LossSum(jnp.where(valid, values, 0.0).sum(), valid.sum())


# -- similarities and distances
# ---------------------------------------------------------------------------------------


def safe_sqrt(x: jax.Array) -> jax.Array:
    """Returns the square root. Its gradient at 0 is 0 instead of infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def pairwise_similarity(a: jax.Array, b: jax.Array, similarity: Similarity) -> jax.Array:
    """Returns the similarities of the vectors in `a` to the vectors at the same index in `b`.

    The last axis contains the features.
    """
    if similarity == "cosine":
        a, b = l2_normalize(a), l2_normalize(b)
    return (a * b).sum(-1)


def angle_similarity(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the AnglE similarities (Li and Li, 2024) of vectors at the same index.

    The vectors are interpreted as complex numbers: one half of the features are real parts, the
    other half imaginary parts. The similarity is the absolute value of the cosine plus the sine of
    the angle between them.
    """
    if a.shape[-1] % 2:
        a, b = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) for x in (a, b))
    a, b = l2_normalize(a), l2_normalize(b)
    (first_a, last_a), (first_b, last_b) = (jnp.split(x, 2, axis=-1) for x in (a, b))
    return jnp.abs((a * b).sum(-1) + (last_a * first_b - first_a * last_b).sum(-1))


def pairwise_distance(a: jax.Array, b: jax.Array, distance: Distance) -> jax.Array:
    """Returns the distances between the vectors in `a` and the vectors at the same index in `b`.

    The last axis contains the features.
    """
    if distance == "cosine":
        return 1 - pairwise_similarity(a, b, "cosine")
    if distance == "manhattan":
        return jnp.abs(a - b).sum(-1)
    return safe_sqrt(jnp.square(a - b).sum(-1))


def distance_matrix(vectors: jax.Array, distance: Distance) -> jax.Array:
    """Returns the distances, `(rows, rows)`, between all pairs of vectors, `(rows, features)`."""
    if distance == "cosine":
        vectors = l2_normalize(vectors)
        return 1 - _matmul(vectors, vectors.T)
    if distance == "manhattan":
        return jnp.abs(vectors[:, None] - vectors[None]).sum(-1)
    products = _matmul(vectors, vectors.T)
    squares = jnp.diagonal(products)
    return safe_sqrt(squares[None] - 2 * products + squares[:, None])


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


# -- ranking among the texts of the batch
# ---------------------------------------------------------------------------------------


def multiple_negatives_ranking(
    vectors: jax.Array,
    valid: jax.Array,
    *,
    scale: float = 20.0,
    similarity: Similarity = "cosine",
    directions: Sequence[Direction] = ("query_to_doc",),
    partition_mode: Literal["joint", "per_direction"] = "joint",
    hardness_mode: Hardness | None = None,
    hardness_strength: float = 0.0,
    chunk_rows: int | None = None,
    sharded: Sharded | None = None,
) -> LossSum:
    """Compares each anchor with all positives and negatives of the batch (InfoNCE).

    The loss is the cross-entropy of a softmax over the scaled similarities, in which the anchor's
    positive is the correct class (van den Oord et al., 2018; Henderson et al., 2017). It
    corresponds to ``MultipleNegativesRankingLoss`` and to its cached and symmetric variants.

    Args:
        vectors: Vectors of anchor, positive and any negatives, `(rows, texts, features)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        scale: Factor of the similarities (1 / temperature).
        similarity: The similarity function.
        directions: Which similarities are part of the softmax. For example, "doc_to_query" adds the
            similarities of the positive to all queries. "query_to_doc" is always included.
        partition_mode: "joint" uses one softmax for the similarities of all directions.
            "per_direction" returns the mean of a separate loss for each direction.
        hardness_mode: The negatives to whose logits a term is added that grows with their
            similarity, so that hard negatives have more weight.
        hardness_strength: The added term is this factor times the similarity. It has no gradient.
        chunk_rows: Number of anchors per device that are scored at a time. The scores are then
            recomputed in the backward pass. Default: all anchors.
        sharded: How the rows are split over devices.
    """
    rows, texts, features = vectors.shape
    if similarity == "cosine":
        vectors = l2_normalize(vectors)
    queries = vectors[:, 0]
    # The documents are all positives, then the first negatives of all rows, and so on.
    documents = vectors[:, 1:].swapaxes(0, 1).reshape(rows * (texts - 1), features)
    document_valid = jnp.tile(valid, texts - 1)
    row_of_document = jnp.tile(jnp.arange(rows), texts - 1)
    is_positive = jnp.arange(rows * (texts - 1)) < rows

    def chunk_losses(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, positive, number, is_valid = chunk
        is_own = number[:, None] == row_of_document
        own_query = number[:, None] == jnp.arange(rows)
        scores: dict[str, jax.Array] = {}
        for direction in dict.fromkeys(("query_to_doc", *directions)):
            left = query if direction.startswith("query") else positive
            is_document = direction.endswith("doc")
            similarities = _matmul(left, (documents if is_document else queries).T)
            logits = similarities * scale
            if direction == "query_to_doc" and hardness_mode and hardness_strength:
                harder = {
                    "hard_negatives": is_own & ~is_positive,
                    "in_batch_negatives": ~is_own,
                    "all_negatives": ~is_own | ~is_positive,
                }[hardness_mode]
                penalty = hardness_strength * jax.lax.stop_gradient(similarities)
                logits = logits + jnp.where(harder, penalty, 0.0)
            hidden = ~(document_valid if is_document else valid)
            if direction == "query_to_query":
                hidden = hidden | own_query
            elif direction == "doc_to_doc":
                hidden = hidden | is_own
            scores[direction] = jnp.where(hidden, -jnp.inf, logits)
        labels = jnp.where(is_valid, number, IGNORE_INDEX)
        total, _, correct = cross_entropy(scores["query_to_doc"], labels)
        if len(scores) > 1 and partition_mode == "joint":
            total = cross_entropy(jnp.concatenate([*scores.values()], 1), labels)[0]
        elif len(scores) > 1:
            # In each direction, the score of the positive pair is in the same column.
            totals = jnp.stack([cross_entropy(part, labels)[0] for part in scores.values()])
            total = totals.mean()
        return total[None], correct[None]

    arrays = (queries, vectors[:, 1], jnp.arange(rows), valid)
    total, correct = map_chunks(chunk_losses, arrays, chunk_rows, sharded, sums=True)
    return LossSum(total.sum(), valid.sum(), correct.sum())


def in_batch_ranking(scores: jax.Array, valid: jax.Array, *, scale: float = 1.0) -> LossSum:
    """Ranks the positive of each query among all documents, from precomputed scores.

    Args:
        scores: Scores of each query with each document, `(rows, documents per row * rows)`. The
            documents are all positives, then the first negatives of all rows, and so on.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        scale: Factor of the scores.
    """
    rows = len(scores)
    hidden = ~jnp.tile(valid, scores.shape[1] // rows)
    labels = jnp.where(valid, jnp.arange(rows), IGNORE_INDEX)
    logits = jnp.where(hidden, -jnp.inf, scores * scale)
    total, count, correct = cross_entropy(logits, labels)
    return LossSum(total, count, correct)


def gist(
    vectors: jax.Array,
    guide: jax.Array,
    valid: jax.Array,
    *,
    temperature: float = 0.01,
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    chunk_rows: int | None = None,
    sharded: Sharded | None = None,
) -> LossSum:
    """Computes InfoNCE without candidates that are probably false negatives (GISTEmbed).

    A guide model selects the excluded candidates (Solatorio, 2024). Corresponds to
    ``GISTEmbedLoss`` and ``CachedGISTEmbedLoss``.

    Args:
        vectors: Vectors of anchor, positive and at most one negative, `(rows, texts, features)`.
        guide: Vectors of the guide for the same texts, `(rows, texts, guide features)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        temperature: Divisor of the cosine similarities.
        margin_strategy: Whether ``margin`` is an absolute similarity, or a fraction of the
            similarity of the positive.
        margin: According to the guide, anchor and positive have a similarity. Candidates with a
            similarity above this value minus the margin are excluded.
        contrast_anchors: Whether the similarities between anchors are candidates.
        contrast_positives: Whether the similarities between positives are candidates.
        chunk_rows: Number of anchors per device that are scored at a time. Default: all anchors.
        sharded: How the rows are split over devices.
    """
    rows = len(vectors)
    vectors, guide = l2_normalize(vectors), jax.lax.stop_gradient(l2_normalize(guide))
    # Each group of candidates contains the similarities of two texts, given by their columns.
    groups = [(0, 1)] + [(0, 0)] * contrast_anchors + [(1, 1)] * contrast_positives
    groups += [(0, 2)] * (vectors.shape[1] > 2)

    def chunk_losses(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        own_vectors, own_guide, number, is_valid = chunk
        threshold = (own_guide[:, 0] * own_guide[:, 1]).sum(-1, keepdims=True)
        slack = margin if margin_strategy == "absolute" else jnp.abs(threshold) * margin
        is_own = number[:, None] == jnp.arange(rows)
        scores = []
        for left, right in groups:
            guide_scores = _matmul(own_guide[:, left], guide[:, right].T)
            hidden = guide_scores > threshold - slack
            if (left, right) == (0, 1):
                hidden &= ~is_own
            elif left == right:
                # The similarity of a text to itself is set to 1, because rounding can change it.
                hidden |= is_own & (1.0 > threshold - slack)
            similarities = _matmul(own_vectors[:, left], vectors[:, right].T)
            scores.append(jnp.where(hidden | ~valid, -jnp.inf, similarities))
        labels = jnp.where(is_valid, number, IGNORE_INDEX)
        total, _, correct = cross_entropy(jnp.concatenate(scores, 1) / temperature, labels)
        return total[None], correct[None]

    arrays = (vectors, guide, jnp.arange(rows), valid)
    total, correct = map_chunks(chunk_losses, arrays, chunk_rows, sharded, sums=True)
    return LossSum(total.sum(), valid.sum(), correct.sum())


# -- pairs with scores or classes
# ---------------------------------------------------------------------------------------


def cosent(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    scale: float = 20.0,
    angle: bool = False,
) -> LossSum:
    """Makes the similarities of pairs have the same order as their labels (CoSENT, AnglE).

    The loss is log(1 + Σ exp(scale (s_j − s_i))), where s_i is the similarity of pair i and the sum
    is over all i, j with label_i > label_j. It is computed in O(n log n) with sorted labels.
    Corresponds to ``CoSENTLoss`` and ``AnglELoss``.

    Args:
        vectors: Vectors of both texts, `(rows, 2, features)`. With ``angle``, rows can have more
            texts. Each of these forms a pair with the first text, whose label is one minus the
            label of the row.
        labels: Gold similarities, `(rows,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        scale: Factor of the similarities.
        angle: Whether to use the AnglE similarity instead of the cosine.
    """
    rows, texts, _ = vectors.shape
    count = valid.sum()
    if angle:
        scores = angle_similarity(vectors[:, :1], vectors[:, 1:]).T.reshape(-1)
        labels = jnp.concatenate([labels, jnp.tile(1 - labels, texts - 2)])
        valid = jnp.tile(valid, texts - 1)
    else:
        scores = pairwise_similarity(vectors[:, 0], vectors[:, 1], "cosine")
    scores, labels = scores.astype(jnp.float32) * scale, labels.astype(jnp.float32)
    order = jnp.argsort(labels)
    labels, scores, valid = labels[order], scores[order], valid[order]
    suffix = jax.lax.cumlogsumexp(jnp.where(valid, -scores, LOG_ZERO), reverse=True)
    suffix = jnp.append(suffix, LOG_ZERO)
    # For each pair, the logarithm of the sum of the terms of all pairs with larger labels.
    terms = scores + suffix[jnp.searchsorted(labels, labels, side="right")]
    terms = jnp.where(valid, terms, LOG_ZERO)
    loss = jax.nn.logsumexp(jnp.append(terms, 0.0))
    return LossSum(loss * count, count)


def cosine_similarity_loss(vectors: jax.Array, labels: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the squared error between cosines and labels (``CosineSimilarityLoss``)."""
    cosines = pairwise_similarity(vectors[:, 0], vectors[:, 1], "cosine")
    return weighted_sum(jnp.square(cosines - labels), valid)


def contrastive(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 0.5,
    distance: Distance = "cosine",
) -> LossSum:
    """Pulls pairs with label 1 together and pushes pairs with label 0 apart (``ContrastiveLoss``).

    Source: Hadsell et al. (2006).

    Args:
        vectors: Vectors of both texts, `(rows, 2, features)`.
        labels: 1 for similar texts, 0 for others, `(rows,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        margin: Distance beyond which pairs with label 0 have no loss.
        distance: The distance function.
    """
    distances = pairwise_distance(vectors[:, 0], vectors[:, 1], distance)
    apart = jnp.square(jax.nn.relu(margin - distances))
    return weighted_sum(0.5 * (labels * jnp.square(distances) + (1 - labels) * apart), valid)


def online_contrastive(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 0.5,
    distance: Distance = "cosine",
) -> LossSum:
    """Returns the contrastive loss of the hard pairs of a batch (``OnlineContrastiveLoss``).

    A pair with label 0 is hard if its distance is smaller than the largest distance of a pair with
    label 1. A pair with label 1 is hard if its distance is larger than the smallest distance of a
    pair with label 0. If all pairs of a batch have the same label, their distances are compared
    with their mean distance instead.

    Args:
        vectors: See :func:`contrastive`.
        labels: See :func:`contrastive`.
        valid: See :func:`contrastive`.
        margin: See :func:`contrastive`.
        distance: See :func:`contrastive`.
    """
    distances = pairwise_distance(vectors[:, 0], vectors[:, 1], distance)
    fixed = jax.lax.stop_gradient(distances)
    positive, negative = valid & (labels == 1), valid & (labels == 0)

    def mean(selected: jax.Array) -> jax.Array:
        return jnp.where(selected, fixed, 0.0).sum() / jnp.maximum(selected.sum(), 1)

    farthest = jnp.where(positive, fixed, -jnp.inf).max()
    nearest = jnp.where(negative, fixed, jnp.inf).min()
    farthest = jnp.where(positive.any(), farthest, mean(negative))
    nearest = jnp.where(negative.any(), nearest, mean(positive))
    together = jnp.where(positive & (fixed > nearest), jnp.square(distances), 0.0)
    apart = jnp.square(jax.nn.relu(margin - distances))
    apart = jnp.where(negative & (fixed < farthest), apart, 0.0)
    return per_batch((together + apart).sum(), valid)


# -- triplets
# ---------------------------------------------------------------------------------------


def triplet(
    vectors: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 5.0,
    distance: Distance = "euclidean",
) -> LossSum:
    """Makes the positive nearer than the negative by a margin (``TripletLoss``).

    Args:
        vectors: Vectors of anchor, positive and negative, `(rows, 3, features)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        margin: The margin.
        distance: The distance function.
    """
    anchor, positive, negative = (vectors[:, text] for text in range(3))
    difference = pairwise_distance(anchor, positive, distance)
    difference -= pairwise_distance(anchor, negative, distance)
    return weighted_sum(jax.nn.relu(difference + margin), valid)


def batch_all_triplet(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 5.0,
    distance: Distance = "euclidean",
) -> LossSum:
    """Returns the mean triplet loss over all triplets of the batch whose loss is not zero.

    A triplet consists of two texts of the same class and a text of another class. Corresponds to
    ``BatchAllTripletLoss`` (Hermans et al., 2017).

    Args:
        vectors: Vectors of texts, `(rows, features)`.
        labels: Class IDs, `(rows,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        margin: The margin.
        distance: The distance function.
    """
    distances = distance_matrix(vectors, distance)
    positive, negative = _triplet_masks(labels, valid)

    @jax.checkpoint
    def anchor_losses(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        distance, is_positive, is_negative = row
        losses = jax.nn.relu(distance[:, None] - distance[None] + margin)
        losses = jnp.where(is_positive[:, None] & is_negative[None], losses, 0.0)
        return losses.sum(), (losses > 1e-16).sum()

    totals, counts = jax.lax.map(anchor_losses, (distances, positive, negative))
    return LossSum(totals.sum(), counts.sum())


def batch_hard_triplet(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 5.0,
    distance: Distance = "euclidean",
) -> LossSum:
    """Returns the triplet loss of the hardest triplets (``BatchHardTripletLoss``).

    For each anchor, the triplet contains the farthest positive and the nearest negative.

    Args:
        vectors: See :func:`batch_all_triplet`.
        labels: See :func:`batch_all_triplet`.
        valid: See :func:`batch_all_triplet`.
        margin: See :func:`batch_all_triplet`.
        distance: See :func:`batch_all_triplet`.
    """
    distances = distance_matrix(vectors, distance)
    positive, negative = _triplet_masks(labels, valid)
    farthest = _largest(jnp.where(positive, distances, 0.0))
    largest = _largest(jnp.where(valid, distances, -jnp.inf))
    candidates = distances + jnp.where(negative, 0.0, largest[:, None])
    nearest = -_largest(jnp.where(valid, -candidates, -jnp.inf))
    return weighted_sum(jax.nn.relu(farthest - nearest + margin), valid)


def batch_semi_hard_triplet(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    margin: float = 5.0,
    distance: Distance = "euclidean",
) -> LossSum:
    """Returns the triplet loss of semi-hard negatives (``BatchSemiHardTripletLoss``).

    For each anchor and positive, the negative is the nearest one that is farther than the positive.
    If there is none, it is the farthest negative (Schroff et al., 2015).

    Args:
        vectors: See :func:`batch_all_triplet`.
        labels: See :func:`batch_all_triplet`.
        valid: See :func:`batch_all_triplet`.
        margin: See :func:`batch_all_triplet`.
        distance: See :func:`batch_all_triplet`.
    """
    distances = distance_matrix(vectors, distance)
    positive, negative = _triplet_masks(labels, valid)
    order = jnp.argsort(jnp.where(negative, distances, jnp.inf), axis=1)
    ascending = jnp.take_along_axis(jnp.where(negative, distances, jnp.inf), order, axis=1)
    search = functools.partial(jnp.searchsorted, side="right")
    positions = jax.vmap(search)(*map(jax.lax.stop_gradient, (ascending, distances)))
    num_negatives = negative.sum(1, keepdims=True)
    outside = jnp.take_along_axis(distances, order, axis=1)
    outside = jnp.take_along_axis(outside, jnp.minimum(positions, len(labels) - 1), axis=1)
    inside = _largest(jnp.where(negative, distances, 0.0))[:, None]
    selected_negatives = jnp.where(positions < num_negatives, outside, inside)
    losses = jnp.where(positive, jax.nn.relu(distances - selected_negatives + margin), 0.0)
    return LossSum(losses.sum(), positive.sum())


def _triplet_masks(labels: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two masks, `(rows, rows)`: the positives and the negatives of each row."""
    both = valid[:, None] & valid[None]
    equal = labels[:, None] == labels[None]
    return both & equal & ~jnp.eye(len(labels), dtype=bool), both & ~equal


def _largest(values: jax.Array) -> jax.Array:
    """Returns the maximum of each row. If several values are equal, the first has the gradient."""
    return jnp.take_along_axis(values, values.argmax(1)[:, None], axis=1)[:, 0]


# -- distillation
# ---------------------------------------------------------------------------------------


def teacher_margins(labels: jax.Array, negatives: int) -> jax.Array:
    """Returns a teacher's score of the positive minus its score of each negative.

    Args:
        labels: These differences, `(rows,)` or `(rows, negatives)`, or the scores of the positive
            and the negatives, `(rows, negatives + 1)`.
        negatives: Number of negatives.

    Returns:
        The differences, `(rows, negatives)`.
    """
    labels = labels[:, None] if labels.ndim == 1 else labels
    return labels[:, :1] - labels[:, 1:] if labels.shape[1] == negatives + 1 else labels


def margin_mse(scores: jax.Array, labels: jax.Array, valid: jax.Array) -> LossSum:
    """Returns the squared error of score margins (``MarginMSELoss``; Hofstätter et al., 2020).

    A margin is the score of the positive minus the score of a negative.

    Args:
        scores: Scores of the positive and of the negatives, `(rows, negatives + 1)`.
        labels: Margins or scores of a teacher, as :func:`teacher_margins` accepts them.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
    """
    margins = scores[:, :1] - scores[:, 1:]
    errors = jnp.square(margins - teacher_margins(labels, margins.shape[1]))
    return weighted_sum(errors.mean(1), valid)


def distill_kl_div(
    scores: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
) -> LossSum:
    """Returns the KL divergence from a teacher's distribution over the documents of a query.

    The distributions are the softmax of the scores. Corresponds to ``DistillKLDivLoss`` (Lin et
    al., 2020).

    Args:
        scores: Scores of the documents of each query, `(rows, documents)`.
        labels: Scores of the teacher, `(rows, documents)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        temperature: Divisor of the scores. The loss is multiplied by its square.
        teacher_temperature: Divisor of the teacher's scores. Default: ``temperature``.
    """
    student = jax.nn.log_softmax(scores / temperature)
    teacher = jax.nn.log_softmax(labels / (teacher_temperature or temperature))
    divergence = (jnp.exp(teacher) * (teacher - student)).sum(1)
    return weighted_sum(temperature**2 * divergence, valid)


def embed_distill(
    vectors: jax.Array,
    labels: jax.Array,
    valid: jax.Array,
    *,
    metric: Literal["mse", "l2", "cosine"] = "cosine",
) -> LossSum:
    """Compares vectors with those of a teacher (``EmbedDistillLoss`` and ``MSELoss``).

    Args:
        vectors: Vectors of texts, `(rows, texts, features)`.
        labels: Vectors of the teacher. Their shape is that of `vectors`, or `(rows, features)` if
            all texts of a row have the same teacher vector.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        metric: The distance function. "mse" is the squared error averaged over features.
    """
    labels = labels[:, None] if labels.ndim == 2 else labels
    if metric == "mse":
        errors = jnp.square(vectors - labels).mean(-1)
    elif metric == "l2":
        errors = safe_sqrt(jnp.square(vectors - labels).sum(-1))
    else:
        errors = 1 - pairwise_similarity(vectors, labels, "cosine")
    return weighted_sum(errors.mean(1), valid)


def pair_features(vectors: jax.Array) -> jax.Array:
    """Returns the inputs of the classifier of ``SoftmaxLoss``.

    Args:
        vectors: Vectors u and v of the texts of each pair, `(rows, 2, features)`.

    Returns:
        The concatenation of u, v and |u - v|, `(rows, 3 * features)`.
    """
    u, v = vectors[:, 0], vectors[:, 1]
    return jnp.concatenate([u, v, jnp.abs(u - v)], axis=-1)


# -- modifiers
# ---------------------------------------------------------------------------------------


def matryoshka(
    loss: Callable[[jax.Array, Any], LossSum],
    vectors: jax.Array,
    labels: Any,
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> LossSum:
    """Sums a loss of vectors that are truncated to several sizes (``MatryoshkaLoss``).

    Source: Kusupati et al. (2022).

    Args:
        loss: Function that returns the loss of vectors and labels.
        vectors: Vectors, `(..., features)`.
        labels: Labels. If they are vectors with the same number of features, they are also
            truncated.
        dims: Numbers of dimensions to which the vectors are truncated. Truncated vectors are
            normalized.
        weights: Weight of the loss for each number of dimensions. Default: 1.
    """
    results = {}
    for dim in dims:
        is_vector = labels is not None and labels.ndim > 1 and labels.shape[-1] == vectors.shape[-1]
        part = labels[..., :dim] if is_vector else labels
        results[dim] = loss(l2_normalize(vectors[..., :dim]), part)
    largest = results[max(dims)]
    total = jnp.zeros(())
    for dim, weight in zip(dims, weights or [1.0] * len(dims), strict=True):
        result = results[dim]
        # The count of some losses depends on the vectors. The mean loss of each size is multiplied
        # by the count for the largest size, so that the sum has a single count.
        ratio = jnp.maximum(largest.count, 1) / jnp.maximum(result.count, 1)
        total += weight * result.total * ratio
    return LossSum(total, largest.count, largest.correct)


def flops(vectors: jax.Array, valid: jax.Array, threshold: int | None = None) -> jax.Array:
    """Returns the FLOPS regularizer of sparse vectors (Paria et al., 2020, arXiv:2004.05665).

    The regularizer is Σ_v (mean of w_v)², where w_v is the weight of vocabulary entry v and the
    mean is over all vectors of the global batch. If each device computed its own mean, the effect
    of the regularizer would depend on the number of devices.

    Args:
        vectors: Sparse vectors, `(rows, texts, vocab_size)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        threshold: Vectors with at most this number of nonzero weights count as zero vectors.
    """
    weights = jnp.broadcast_to(valid[:, None, None], (*vectors.shape[:2], 1))
    if threshold is not None:
        weights = weights & ((vectors != 0).sum(-1, keepdims=True) > threshold)
    divisor = jnp.maximum(valid.sum() * vectors.shape[1], 1)
    return jnp.square(jnp.where(weights, vectors, 0.0).sum((0, 1)) / divisor).sum()


# -- late interaction
# ---------------------------------------------------------------------------------------

#: Score of a document without visible tokens.
EMPTY_SCORE = -1e9


def maxsim(
    queries: jax.Array,
    documents: jax.Array,
    query_mask: jax.Array,
    document_mask: jax.Array,
    *,
    length_normalize: bool = False,
) -> jax.Array:
    """Returns the MaxSim score of each query with each document.

    The score is Σ_i max_j q_i · d_j, where q_i and d_j are the token vectors of query and document.
    Documents are scored one after the other, and the token scores are recomputed in the backward
    pass. Only the scores between the tokens of one document and all queries are therefore in memory
    at a time.

    Args:
        queries: Token vectors of the queries, `(queries, query tokens, features)`.
        documents: Token vectors of the documents, `(documents, document tokens, features)`.
        query_mask: Mask of the query tokens to score, `(queries, query tokens)`.
        document_mask: Mask of the document tokens to score, `(documents, document tokens)`.
        length_normalize: Whether to divide scores by the number of scored query tokens.

    Returns:
        Scores, float32 `(queries, documents)`. The score of a document without tokens is -1e9.
    """

    @jax.checkpoint
    def score(document: tuple[jax.Array, jax.Array]) -> jax.Array:
        vectors, visible = document
        return _maxsim(queries, vectors[None], query_mask, visible[None])

    scores = jax.lax.map(score, (documents, document_mask)).T
    return _normalize_length(scores, query_mask[:, None], length_normalize)


def maxsim_pairwise(
    queries: jax.Array,
    documents: jax.Array,
    query_mask: jax.Array,
    document_mask: jax.Array,
    *,
    length_normalize: bool = False,
) -> jax.Array:
    """Returns the MaxSim score of each query with its own documents.

    Args:
        queries: Token vectors of the queries, `(queries, query tokens, features)`.
        documents: Token vectors of the documents of each query, `(queries, documents, document
            tokens, features)`.
        query_mask: Mask of the query tokens to score, `(queries, query tokens)`.
        document_mask: Mask of the document tokens to score, `(queries, documents, document
            tokens)`.
        length_normalize: Whether to divide scores by the number of scored query tokens.

    Returns:
        Scores, float32 `(queries, documents)`.
    """
    scores = _maxsim(queries[:, None], documents, query_mask[:, None], document_mask)
    return _normalize_length(scores, query_mask[:, None], length_normalize)


def _maxsim(q: jax.Array, d: jax.Array, q_mask: jax.Array, d_mask: jax.Array) -> jax.Array:
    products = _matmul(q, jnp.swapaxes(d, -1, -2))
    lowest = jnp.finfo(products.dtype).min
    hidden = (d_mask == 0)[..., None, :]
    best = jnp.where(hidden, lowest, products).max(-1).astype(jnp.float32)
    scores = jnp.where(q_mask != 0, best, 0.0).sum(-1)
    return jnp.where((d_mask != 0).any(-1), scores, EMPTY_SCORE)


def _normalize_length(scores: jax.Array, mask: jax.Array, normalize: bool) -> jax.Array:
    return scores / jnp.maximum((mask != 0).sum(-1), 1) if normalize else scores
