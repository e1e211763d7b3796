"""Evaluation of retrieval models: search, reranking, similarity, triplets and pairs.

Each function computes vectors or scores with a model and returns the metrics of
:mod:`hfseq.objectives.retrieval_metrics`, under the names of sentence-transformers' evaluators.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hfseq.data.beir import Collection
from hfseq.errors import DataError, UsageError
from hfseq.modeling.sentence import (
    CrossEncoder,
    MultiVectorEncoder,
    RetrievalModel,
    SparseEncoder,
    TextEncoder,
)
from hfseq.modeling.sentence.search import search
from hfseq.objectives import retrieval_metrics as metrics

#: Number of documents that a cross-encoder reranks for each query.
RERANK_DEPTH = 100


def evaluate_search(
    model: TextEncoder,
    collection: Collection,
    *,
    reranker: CrossEncoder | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> dict[str, float]:
    """Searches the documents of a collection for each query.

    Args:
        model: The encoder.
        collection: Queries, documents and relevance judgments.
        reranker: A cross-encoder that reranks the 100 best documents of each query.
        batch_size: Maximum number of texts per batch.
        show_progress_bar: Whether to show progress bars.

    Returns:
        Metrics such as "cosine_ndcg@10", whose names start with the model's similarity function.
        The names of metrics after reranking start with "reranked". For sparse encoders, the result
        also contains the metrics of
        :func:`~hfseq.objectives.retrieval_metrics.sparse_statistics`.

    Raises:
        UsageError: The model is a cross-encoder.
    """
    check_encoder(model, "search")
    options: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    # Documents of equal similarity are returned in the order of their IDs.
    ids, query_ids = sorted(collection.documents), list(collection.queries)
    relevant = [collection.relevance[item] for item in query_ids]
    documents = model.encode_document([collection.documents[item] for item in ids], **options)
    queries = model.encode_query(list(collection.queries.values()), **options)
    _, indices = search(model, queries, documents, metrics.SEARCH_DEPTH)
    ranking = [[ids[number] for number in row] for row in indices.tolist()]
    results = prefixed(model.similarity_fn_name, metrics.retrieval_metrics(ranking, relevant))
    if isinstance(model, SparseEncoder):
        results |= metrics.sparse_statistics(queries, documents)
    if reranker is not None:
        reranked = []
        for query_id, items in zip(query_ids, ranking, strict=True):
            texts = [collection.documents[item] for item in items[:RERANK_DEPTH]]
            order = reranker.rank(collection.queries[query_id], texts, **options)
            reranked.append([items[entry["corpus_id"]] for entry in order])
        results |= prefixed("reranked", metrics.retrieval_metrics(reranked, relevant))
    return results


def evaluate_reranking(
    model: RetrievalModel,
    samples: Sequence[Mapping[str, Any]],
    *,
    always_rerank_positives: bool = True,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> dict[str, float]:
    """Sorts the documents of each query by their scores, and evaluates the order.

    Args:
        model: A retrieval model of any type.
        samples: Dictionaries with the keys "query", "positive" and either "negative" or
            "documents". "positive" and "negative" are lists of texts. "documents" is the ranked
            result of a first search.
        always_rerank_positives: Whether positives that are not among the "documents" are added to
            them. Otherwise, the metrics of a query without a positive in its "documents" are 0.
        batch_size: Maximum number of texts per batch.
        show_progress_bar: Whether to show progress bars.

    Returns:
        "map", "mrr@10" and "ndcg@10". If samples have "documents", the result also contains the
        metrics of the original order of the documents, such as "base_map".

    Raises:
        DataError: A sample lacks a key, or has a text that is both positive and negative.
    """
    cases, base = [], []
    for number, sample in enumerate(samples, 1):
        query, positives, negatives, documents = _reranking_sample(sample, number)
        if documents is None:
            cases.append((query, [*positives, *negatives], len(positives)))
            continue
        labels = [int(text in positives) for text in documents]
        missing = [1] * (len(positives) - sum(labels)) if any(labels) else []
        order = np.arange(len(labels) + len(missing), 0, -1)
        base.append(metrics.reranking_scores(order, [*labels, *missing], ties="last"))
        others = [text for text in documents if text not in positives]
        if not always_rerank_positives:
            positives = [text for text in documents if text in positives]
        cases.append((query, [*positives, *others], len(positives)))
    ties = "last" if isinstance(model, CrossEncoder) else "first"
    scored = [case for case in cases if case[2]]
    # As in sentence-transformers, bi-encoders are not evaluated on queries without negatives.
    if not isinstance(model, CrossEncoder):
        scored = [case for case in scored if case[2] < len(case[1])]
    scores = _case_scores(model, scored, batch_size, show_progress_bar)
    values = [
        metrics.reranking_scores(row, [1] * count + [0] * (len(texts) - count), ties=ties)
        for row, (_, texts, count) in zip(scores, scored, strict=True)
    ]
    if isinstance(model, CrossEncoder):
        values += [(0.0, 0.0, 0.0)] * (len(cases) - len(scored))
    if not values:
        raise DataError("no sample has both a positive and a negative document")
    names = ("map", f"mrr@{metrics.RERANK_AT}", f"ndcg@{metrics.RERANK_AT}")
    results = dict(zip(names, np.mean(values, axis=0).tolist(), strict=True))
    if base:
        means = np.mean(base, axis=0).tolist()
        results |= {f"base_{name}": mean for name, mean in zip(names, means, strict=True)}
    return results


def _reranking_sample(
    sample: Mapping[str, Any], number: int
) -> tuple[str, list[str], list[str], list[str] | None]:
    """Returns the query, the positives, the negatives and the documents of a sample."""
    lists = {}
    for name in ("positive", "negative", "documents"):
        value = sample.get(name)
        lists[name] = [value] if isinstance(value, str) else value
    if not isinstance(sample.get("query"), str) or lists["positive"] is None:
        raise DataError(
            f"sample {number} requires a 'query' (a text) and a 'positive' (a text or a list of "
            "texts)"
        )
    if (lists["negative"] is None) == (lists["documents"] is None):
        raise DataError(f"sample {number} requires either 'negative' or 'documents', not both")
    negatives = list(lists["negative"] or [])
    if common := [text for text in negatives if text in lists["positive"]]:
        raise DataError(f"sample {number}: {common[0]!r:.60} is both positive and negative")
    documents = None if lists["documents"] is None else list(lists["documents"])
    return sample["query"], list(lists["positive"]), negatives, documents


def _case_scores(
    model: RetrievalModel,
    cases: Sequence[tuple[str, Sequence[str], int]],
    batch_size: int,
    show_progress_bar: bool,
) -> list[np.ndarray]:
    """Returns the scores of the documents of each query.

    Args:
        model: A retrieval model of any type.
        cases: For each query, the query, its documents, and the number of positives among them.
        batch_size: Maximum number of texts per batch.
        show_progress_bar: Whether to show progress bars.
    """
    if not cases:
        return []
    options: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    ends = np.cumsum([len(texts) for _, texts, _ in cases])
    if isinstance(model, CrossEncoder):
        if model.num_labels != 1:
            raise UsageError(
                "reranking requires a cross-encoder with one label, but the model has "
                f"{model.num_labels}"
            )
        pairs = [(query, text) for query, texts, _ in cases for text in texts]
        return np.split(model.predict(pairs, **options), ends[:-1])
    encoder = check_encoder(model, "reranking")
    queries = encoder.encode_query([query for query, _, _ in cases], **options)
    texts = list(itertools.chain.from_iterable(texts for _, texts, _ in cases))
    documents = encoder.encode_document(texts, **options)
    starts = [0, *ends[:-1].tolist()]
    return [
        encoder.similarity(queries[row : row + 1], documents[start:end])[0]
        for row, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True))
    ]


def evaluate_similarity(
    model: RetrievalModel, pairs: Sequence[tuple[str, str]], labels: Sequence[float], **options: Any
) -> dict[str, float]:
    """Correlates the similarities of pairs with gold scores (semantic textual similarity).

    Args:
        model: A retrieval model of any type.
        pairs: Pairs of texts.
        labels: The gold scores of the pairs, on any scale.
        **options: ``batch_size`` and ``show_progress_bar``.

    Returns:
        Correlations such as "pearson_cosine" and "spearman_cosine", whose names end with the
        model's similarity function. For a cross-encoder, they are "pearson" and "spearman".
    """
    scores = pair_scores(model, pairs, **options)
    values = metrics.similarity_metrics(scores, np.asarray(labels, np.float64))
    if isinstance(model, TextEncoder):
        return {f"{name}_{model.similarity_fn_name}": value for name, value in values.items()}
    return values


def evaluate_triplets(
    model: RetrievalModel,
    triplets: Sequence[tuple[str, str, str]],
    margin: float = 0.0,
    **options: Any,
) -> dict[str, float]:
    """Computes the fraction of triplets whose anchor is more similar to the positive.

    Args:
        model: A retrieval model of any type.
        triplets: An anchor, a positive and a negative each.
        margin: The similarity to the positive must exceed the similarity to the negative by more
            than this.
        **options: ``batch_size`` and ``show_progress_bar``.

    Returns:
        The accuracy. Its name starts with the model's similarity function, as in
        "cosine_accuracy". For a cross-encoder, it is "accuracy".
    """
    if isinstance(model, TextEncoder):
        anchors, positives, negatives = (list(side) for side in zip(*triplets, strict=True))
        vectors = model.encode_query(anchors, **options)
        scores = [
            model.similarity_pairwise(vectors, model.encode_document(texts, **options))
            for texts in (positives, negatives)
        ]
        name = f"{model.similarity_fn_name}_accuracy"
    else:
        sides = [[(t[0], t[side]) for t in triplets] for side in (1, 2)]
        scores, name = [pair_scores(model, pairs, **options) for pairs in sides], "accuracy"
    return {name: metrics.triplet_accuracy(scores[0], scores[1], margin)}


def evaluate_pairs(
    model: RetrievalModel, pairs: Sequence[tuple[str, str]], labels: Sequence[int], **options: Any
) -> dict[str, float]:
    """Evaluates the classification of pairs by a threshold on their similarity.

    Args:
        model: A retrieval model of any type.
        pairs: Pairs of texts.
        labels: 1 for similar pairs and 0 for others. For a cross-encoder with several labels, the
            ID of the correct label of each pair.
        **options: ``batch_size`` and ``show_progress_bar``.

    Returns:
        Metrics such as "cosine_ap", whose names start with the model's similarity function. For a
        cross-encoder, they have no such prefix.
    """
    if isinstance(model, CrossEncoder) and model.num_labels > 1:
        return metrics.multi_label_metrics(model.predict(pairs, **options), np.asarray(labels))
    scores = pair_scores(model, pairs, **options)
    if not isinstance(model, TextEncoder):
        return metrics.pair_classification_metrics(scores, np.asarray(labels))
    name = model.similarity_fn_name
    is_distance = name in ("euclidean", "manhattan")
    values = metrics.pair_classification_metrics(
        -scores if is_distance else scores, np.asarray(labels), greater_is_better=not is_distance
    )
    return prefixed(name, values)


def pair_scores(
    model: RetrievalModel, pairs: Sequence[tuple[str, str]], **options: Any
) -> np.ndarray:
    """Returns the similarity or the score of each pair of texts."""
    if isinstance(model, CrossEncoder):
        if model.num_labels != 1:
            raise UsageError(
                "scores of pairs require a cross-encoder with one label, but the model has "
                f"{model.num_labels}"
            )
        return model.predict(list(pairs), **options)
    encoder = check_encoder(model, "similarity")
    # Each distinct text is encoded once.
    texts = {text: number for number, text in enumerate(dict.fromkeys(itertools.chain(*pairs)))}
    vectors = encoder.encode(list(texts), **options)
    sides = [[texts[pair[side]] for pair in pairs] for side in (0, 1)]
    first, second = (
        [vectors[number] for number in numbers]
        if isinstance(encoder, MultiVectorEncoder)
        else vectors[numbers]
        for numbers in sides
    )
    return encoder.similarity_pairwise(first, second)


def prefixed(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Adds ``name`` and an underscore to the names of metrics."""
    return {f"{name}_{key}": value for key, value in values.items()}


def check_encoder(model: RetrievalModel, purpose: str) -> TextEncoder:
    """Checks that a model encodes texts, and returns it.

    Args:
        model: The model.
        purpose: What requires an encoder, for the error message.

    Raises:
        UsageError: The model is a cross-encoder, which only scores pairs.
    """
    if not isinstance(model, TextEncoder):
        raise UsageError(
            f"{purpose} requires a model that encodes texts, not a {model.config.model_type}, "
            "which scores pairs"
        )
    return model
