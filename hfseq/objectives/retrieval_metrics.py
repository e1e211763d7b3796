"""Metrics of search, reranking, semantic similarity and pair classification, in NumPy.

Names, definitions and the treatment of equal scores are the same as in sentence-transformers 6. For
NDCG and average precision, they are the same as in scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from hfseq.errors import DataError
from hfseq.objectives.metrics import f1, matthews_correlation, pearson, spearmanr

#: Cutoffs of the search metrics: the numbers of best documents from which they are computed.
ACCURACY_AT = PRECISION_AT = (1, 3, 5, 10)
MRR_AT = NDCG_AT = (10,)
MAP_AT = (100,)
#: The largest cutoff, and so the number of documents that a search must return.
SEARCH_DEPTH = 100
#: Cutoff of MRR and NDCG in reranking.
RERANK_AT = 10


def check_scores(scores: np.ndarray, name: str) -> np.ndarray:
    """Converts scores to float64, and checks that none is NaN.

    Args:
        scores: The scores.
        name: What the scores are, for the error message.

    Raises:
        DataError: A score is NaN.
    """
    scores = np.asarray(scores, np.float64)
    if np.isnan(scores).any():
        raise DataError(
            f"{int(np.isnan(scores).sum())} of {scores.size} {name} are not numbers (NaN), so no "
            "metric can be computed"
        )
    return scores


# -- search
# ----------------------------------------------------------------------------------------------


def retrieval_metrics(
    ranking: Sequence[Sequence[Any]],
    relevant: Sequence[Set[Any]],
    *,
    accuracy_at: Sequence[int] = ACCURACY_AT,
    precision_at: Sequence[int] = PRECISION_AT,
    mrr_at: Sequence[int] = MRR_AT,
    ndcg_at: Sequence[int] = NDCG_AT,
    map_at: Sequence[int] = MAP_AT,
) -> dict[str, float]:
    """Returns the metrics of a search with binary relevance.

    If documents have the same score, the caller must sort them by their IDs, as
    :func:`rank_documents` does.

    Args:
        ranking: The IDs of the best documents of each query, in the order of decreasing scores.
        relevant: The IDs of the relevant documents of each query. Each query needs at least one.
        accuracy_at: Cutoffs for the fraction of queries with a relevant document.
        precision_at: Cutoffs for precision and recall.
        mrr_at: Cutoffs for the mean reciprocal rank of the first relevant document.
        ndcg_at: Cutoffs for the normalized discounted cumulative gain.
        map_at: Cutoffs for the mean average precision.

    Returns:
        The mean of each metric over the queries. A name is, for example, "ndcg@10".
    """
    depth = max((*accuracy_at, *precision_at, *mrr_at, *ndcg_at, *map_at))
    hits = np.zeros((len(ranking), depth))
    for row, (documents, known) in enumerate(zip(ranking, relevant, strict=True)):
        found = [document in known for document in documents[:depth]]
        hits[row, : len(found)] = found
    totals = np.array([len(known) for known in relevant])
    ranks = np.arange(1, depth + 1)
    counts = hits.cumsum(axis=1)
    discounts = 1 / np.log2(ranks + 1)
    first = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, np.inf)
    metrics: dict[str, Any] = {}
    for k in accuracy_at:
        metrics[f"accuracy@{k}"] = counts[:, k - 1] > 0
    for k in precision_at:
        metrics[f"precision@{k}"] = counts[:, k - 1] / k
        metrics[f"recall@{k}"] = counts[:, k - 1] / totals
    for k in mrr_at:
        metrics[f"mrr@{k}"] = np.where(first <= k, 1 / first, 0)
    for k in ndcg_at:
        ideal = discounts.cumsum()[np.minimum(totals, k) - 1]
        metrics[f"ndcg@{k}"] = (hits * discounts)[:, :k].sum(axis=1) / ideal
    for k in map_at:
        precisions = (hits * counts / ranks)[:, :k].sum(axis=1)
        metrics[f"map@{k}"] = precisions / np.minimum(totals, k)
    return {name: float(np.mean(values)) for name, values in metrics.items()}


def rank_documents(
    scores: np.ndarray, document_ids: Sequence[Any], depth: int = SEARCH_DEPTH
) -> list[list[Any]]:
    """Returns the IDs of the best documents of each query.

    If documents have the same score, the document with the smaller ID comes first, so the result
    does not depend on the order of the documents.

    Args:
        scores: Scores, `(queries, documents)`.
        document_ids: The IDs of the documents.
        depth: Number of documents per query.

    Raises:
        DataError: A score is not a number.
    """
    check_scores(scores, "scores")
    order = sorted(range(len(document_ids)), key=lambda number: document_ids[number])
    ranked = np.asarray(scores)[:, order]
    best = np.argsort(-ranked, axis=1, kind="stable")[:, :depth]
    return [[document_ids[order[number]] for number in row] for row in best.tolist()]


# -- reranking
# ----------------------------------------------------------------------------------------------


def reranking_metrics(
    scores: Sequence[np.ndarray],
    relevance: Sequence[Sequence[int]],
    *,
    k: int = RERANK_AT,
    ties: str = "first",
) -> dict[str, float]:
    """Evaluates the order of the documents of each query.

    Args:
        scores: The scores of the documents of each query.
        relevance: 1 for each relevant document and 0 for the others, in the same order.
        k: Cutoff of MRR and NDCG.
        ties: How the reciprocal rank treats documents with the same score. "first" keeps their
            order, as sentence-transformers does for bi-encoders. "last" reverses it, as
            sentence-transformers does for cross-encoders.

    Returns:
        The means of "map", "mrr@10" and "ndcg@10" over the queries.

    Raises:
        DataError: A score is not a number.
    """
    values = [
        reranking_scores(query_scores, labels, k=k, ties=ties)
        for query_scores, labels in zip(scores, relevance, strict=True)
    ]
    means = np.mean(values, axis=0) if values else np.zeros(3)
    return dict(zip(("map", f"mrr@{k}", f"ndcg@{k}"), map(float, means), strict=True))


def reranking_scores(
    scores: np.ndarray, labels: Sequence[int], *, k: int = RERANK_AT, ties: str = "first"
) -> tuple[float, float, float]:
    """Returns the average precision, the reciprocal rank and the NDCG of one query.

    If no document is relevant, they are 0. The arguments are those of :func:`reranking_metrics`,
    for one query.
    """
    scores, relevant = check_scores(scores, "scores"), np.asarray(labels) > 0
    if not relevant.any():
        return 0.0, 0.0, 0.0
    order = np.argsort(scores)[::-1] if ties == "last" else np.argsort(-scores, kind="stable")
    top = relevant[order[:k]]
    reciprocal_rank = 1 / (top.argmax() + 1) if top.any() else 0.0
    return average_precision(scores, labels), float(reciprocal_rank), ndcg(scores, labels, k)


def ndcg(scores: np.ndarray, gains: Sequence[float], k: int | None = None) -> float:
    """Returns the normalized discounted cumulative gain, like scikit-learn's ``ndcg_score``.

    If documents have the same score, each of them has the mean of their gains.

    Args:
        scores: The scores of the documents.
        gains: The relevance of each document, which must not be negative.
        k: Number of best documents that count. Default: all documents.
    """
    values = np.asarray(gains, np.float64)
    discounts = 1 / np.log2(np.arange(len(values)) + 2)
    if k is not None:
        discounts[k:] = 0
    _, group, counts = np.unique(-np.asarray(scores), return_inverse=True, return_counts=True)
    means = np.bincount(group, values) / counts
    ends = counts.cumsum() - 1
    summed = np.diff(discounts.cumsum()[ends], prepend=0)
    ideal = np.sort(values)[::-1] @ discounts
    return float(means @ summed / ideal) if ideal else 0.0


def average_precision(scores: np.ndarray, labels: Sequence[int] | np.ndarray) -> float:
    """Returns the average precision, like scikit-learn's ``average_precision_score``.

    Documents with the same score are not ordered: precision and recall include all of them or none.

    Args:
        scores: The scores of the documents.
        labels: Whether each document is relevant.
    """
    relevant = (np.asarray(labels) > 0).astype(np.float64)
    total = relevant.sum()
    if not total:
        return 0.0
    _, group, counts = np.unique(-np.asarray(scores), return_inverse=True, return_counts=True)
    hits = np.bincount(group, relevant)
    precision = hits.cumsum() / counts.cumsum()
    return float(precision @ hits / total)


# -- similarity, triplets and pair classification
# ----------------------------------------------------------------------------------------------


def similarity_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the Pearson and Spearman correlations between similarities and gold scores."""
    scores = check_scores(scores, "similarities")
    return {"pearson": pearson(scores, labels), "spearman": spearmanr(scores, labels)}


def triplet_accuracy(positive: np.ndarray, negative: np.ndarray, margin: float = 0.0) -> float:
    """Returns the fraction of anchors that are closer to their positive than to their negative.

    Args:
        positive: Similarities of anchors and positives.
        negative: Similarities of anchors and negatives.
        margin: The similarity to the positive must exceed the similarity to the negative by more
            than this.
    """
    positive, negative = (check_scores(v, "similarities") for v in (positive, negative))
    return float((positive > negative + margin).mean())


def pair_classification_metrics(
    scores: np.ndarray, labels: np.ndarray, *, greater_is_better: bool = True
) -> dict[str, float]:
    """Returns metrics for classifying pairs by a threshold on their similarity.

    Args:
        scores: Similarities or distances, `(pairs,)`.
        labels: 1 for similar pairs and 0 for others.
        greater_is_better: Whether similar pairs have larger scores.

    Returns:
        "accuracy" and "f1", each at its best threshold, and these thresholds as
        "accuracy_threshold" and "f1_threshold". "precision", "recall" and "mcc" are computed at the
        threshold of "f1". "ap" is the average precision.

    Raises:
        DataError: A score is not a number, or a label is neither 0 nor 1.
    """
    scores, labels = check_scores(scores, "scores"), np.asarray(labels)
    if not np.isin(labels, (0, 1)).all():
        raise DataError(f"the labels must be 0 or 1, not {labels[~np.isin(labels, (0, 1))][0]!r}")
    sign = 1 if greater_is_better else -1
    order = np.argsort(-sign * scores, kind="stable")
    ordered, relevant = scores[order], labels[order]
    ends = np.flatnonzero(np.append(np.diff(ordered) != 0, True))
    hits, accepted = relevant.cumsum()[ends], ends + 1
    following = np.append(ordered[ends[:-1] + 1], ordered[-1])
    thresholds = np.where(ends == len(ordered) - 1, ordered[ends], (ordered[ends] + following) / 2)
    # Rounding can make the midpoint equal to the next score, which must not be accepted.
    is_next = (thresholds == following) & (ends != len(ordered) - 1)
    thresholds = np.where(is_next, ordered[ends], thresholds)
    positives, negatives = relevant.sum(), (relevant == 0).sum()
    correct = hits + negatives - (accepted - hits)
    best = int(correct.argmax())
    accuracy, accuracy_threshold = correct[best] / len(labels), thresholds[best]
    if negatives >= correct[best]:
        accuracy, accuracy_threshold = (
            negatives / len(labels),
            np.nextafter(ordered[0], sign * np.inf),
        )
    precision, recall = hits / accepted, hits / max(positives, 1)
    f1_scores = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    top = int(f1_scores.argmax())
    f1_threshold = thresholds[top] if hits.any() else 0.0
    predicted = scores >= f1_threshold if greater_is_better else scores <= f1_threshold
    return {
        "accuracy": float(accuracy),
        "accuracy_threshold": float(accuracy_threshold),
        "f1": float(f1_scores[top]),
        "f1_threshold": float(f1_threshold),
        "precision": float(precision[top]) if hits.any() else 0.0,
        "recall": float(recall[top]) if hits.any() else 0.0,
        "ap": average_precision(sign * scores, labels),
        "mcc": matthews_correlation(predicted.astype(int), labels.astype(int)),
    }


def multi_label_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the F1 scores of a classifier with several labels.

    Args:
        scores: Scores, `(pairs, labels)`. The label with the largest score is the prediction.
        labels: IDs of the correct labels, `(pairs,)`.
    """
    predictions = check_scores(scores, "scores").argmax(axis=1)
    labels = np.asarray(labels, int)
    classes = np.unique(np.concatenate([labels, predictions]))
    per_class = [f1(predictions == c, labels == c) for c in classes]
    counts = [(labels == c).sum() for c in classes]
    return {
        "f1_macro": float(np.mean(per_class)),
        "f1_micro": float((predictions == labels).mean()),
        "f1_weighted": float(np.average(per_class, weights=counts)),
    }


# -- sparse vectors and fusion
# ----------------------------------------------------------------------------------------------


def sparse_statistics(queries: Any, documents: Any) -> dict[str, float]:
    """Returns statistics of the nonzero weights of sparse vectors.

    Args:
        queries: The vectors of queries, a sparse SciPy array or a dense array
            `(queries, vocab_size)`.
        documents: The vectors of documents, as `queries`.

    Returns:
        "query_active_dims" and "corpus_active_dims", the mean numbers of nonzero weights per query
        and per document, and "avg_flops", the mean number of dimensions in which both a query and a
        document have nonzero weights.
    """
    shares = []
    for vectors in (queries, documents):
        active = np.asarray((vectors != 0).sum(axis=0), np.float64).reshape(-1)
        shares.append(active / vectors.shape[0])
    return {
        "query_active_dims": float(shares[0].sum()),
        "corpus_active_dims": float(shares[1].sum()),
        "avg_flops": float(shares[0] @ shares[1]),
    }


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Any]], k: int = 60
) -> list[tuple[Any, float]]:
    """Combines several rankings of documents (Cormack et al., 2009).

    The score of a document is the sum of `1 / (k + rank)` over the rankings that contain it.

    Args:
        rankings: Rankings, each a list of document IDs that starts with the best document.
        k: Constant. The larger it is, the less the first ranks are preferred to the others.

    Returns:
        Document IDs and their scores, in the order of decreasing scores.
    """
    scores: dict[Any, float] = {}
    for ranking in rankings:
        for rank, document in enumerate(ranking, 1):
            scores[document] = scores.get(document, 0.0) + 1 / (k + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
