"""Mining of hard negatives: texts that a model ranks high for a query, but that are not relevant.

The filters, the defaults and the output formats are those of ``mine_hard_negatives`` in
sentence-transformers 6.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfseq.errors import DataError, UsageError
from hfseq.modeling.sentence import CrossEncoder, SparseEncoder, TextEncoder
from hfseq.modeling.sentence.search import search

logger = logging.getLogger(__name__)

OUTPUT_FORMATS = ("triplet", "n-tuple", "labeled-pair", "labeled-list")
STRATEGIES = ("top", "random")


@dataclass(frozen=True)
class Mining:
    """Settings for the selection of hard negatives.

    A candidate is removed if it is one of the positives of its query, or if its score exceeds the
    lowest score of these positives minus a margin. Such a candidate is probably relevant.

    Attributes:
        num_negatives: Number of negatives per query.
        range_min: Number of best remaining candidates to skip.
        range_max: Number of candidates to consider. The default is the sum of `range_min`,
            `num_negatives` (times ten if there is a filter) and the largest number of positives of
            a query.
        max_score: Candidates with a higher score are removed.
        min_score: Candidates with a lower score are removed.
        absolute_margin: The minimum difference from the score of the positive.
        relative_margin: The minimum difference, as a fraction of the absolute score of the
            positive.
        sampling_strategy: "top" selects the best candidates, "random" samples them.
        output_format: An element of ``OUTPUT_FORMATS``.
        output_scores: Whether the rows contain scores.
        seed: Seed of "random".
    """

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling_strategy: str = "top"
    output_format: str = "triplet"
    output_scores: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("output_format", OUTPUT_FORMATS),
            ("sampling_strategy", STRATEGIES),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"unknown {name} {getattr(self, name)!r}: {', '.join(known)}")
        if self.num_negatives < 1 or self.range_min < 0:
            raise UsageError("num_negatives must be at least 1 and range_min at least 0")
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            raise UsageError(
                f"range_max {self.range_max} minus range_min {self.range_min} must be at least "
                f"num_negatives {self.num_negatives}"
            )

    @property
    def margins(self) -> bool:
        """Whether candidates are compared with the positives of their query."""
        return self.absolute_margin is not None or self.relative_margin is not None

    def depth(self, max_positives: int, reranks: bool) -> int:
        """Returns the number of candidates that are considered per query.

        Args:
            max_positives: The largest number of positives of a query.
            reranks: Whether a cross-encoder computes the scores.
        """
        if self.range_max is not None:
            return self.range_max
        filters = self.margins or self.max_score is not None
        filters = filters or (reranks and self.min_score is not None)
        return self.range_min + self.num_negatives * (10 if filters else 1) + max_positives


def mine(
    model: TextEncoder,
    anchors: Sequence[str],
    positives: Sequence[str],
    mining: Mining | None = None,
    *,
    corpus: Sequence[str] | None = None,
    cross_encoder: CrossEncoder | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
    names: tuple[str, str] = ("anchor", "positive"),
) -> list[dict[str, Any]]:
    """Finds hard negatives.

    Args:
        model: The model that searches.
        anchors: Queries. A query that occurs several times has several positives.
        positives: The relevant document of each query.
        mining: How negatives are selected.
        corpus: Texts from which negatives are selected. The default is the positives.
        cross_encoder: A model that computes the scores for the filters.
        batch_size: Maximum number of texts per batch.
        show_progress_bar: Whether to show progress bars.
        names: The names of the columns of queries and documents in the result.

    Returns:
        The rows, in the format ``mining.output_format``.

    Raises:
        DataError: The lists of texts are empty, or their lengths differ.
        UsageError: The model is not an encoder.
    """
    mining = Mining() if mining is None else mining
    if len(anchors) != len(positives) or not len(anchors):
        raise DataError(
            "mining requires one positive for each anchor, and at least one anchor, but there are "
            f"{len(anchors)} anchors and {len(positives)} positives"
        )
    if not isinstance(model, TextEncoder):
        raise UsageError("mining requires a model that encodes texts, not a cross-encoder")
    documents = list(dict.fromkeys([*(positives if corpus is None else corpus), *positives]))
    numbers = {text: number for number, text in enumerate(documents)}
    positives_of: dict[str, list[int]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        known = positives_of.setdefault(anchor, [])
        if numbers[positive] not in known:
            known.append(numbers[positive])
    queries = list(positives_of)
    counts: dict[str, int] = {}
    for anchor in anchors:
        counts[anchor] = counts.get(anchor, 0) + 1
    max_positives = max(counts.values())
    options: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    encode_options = dict(options)
    if not isinstance(model, SparseEncoder):
        encode_options["normalize_embeddings"] = True
    document_vectors = model.encode_document(documents, **encode_options)
    query_vectors = model.encode_query(queries, **encode_options)
    reranks = cross_encoder is not None
    depth = mining.depth(max_positives, reranks)
    scores, indices = search(model, query_vectors, document_vectors, depth + max_positives)
    uses_scores = mining.margins or mining.max_score is not None or mining.min_score is not None
    generator = random.Random(mining.seed)
    rows: list[dict[str, Any]] = []
    complete = 0
    for number, query in enumerate(queries):
        known = positives_of[query]
        candidates, candidate_scores = indices[number], scores[number].astype(np.float32)
        if cross_encoder is not None and uses_scores:
            texts = [documents[index] for index in [*candidates, *known]]
            values = cross_encoder.predict([(query, text) for text in texts], **options)
            candidate_scores, positive_scores = np.split(values, [len(candidates)])
        else:
            pairs = [query_vectors[number : number + 1]] * len(known)
            positive_scores = np.array(
                [
                    model.similarity(vector, document_vectors[index : index + 1])[0, 0]
                    for vector, index in zip(pairs, known, strict=True)
                ]
            )
        allowed = ~np.isin(candidates, known) & _accepted(candidate_scores, positive_scores, mining)
        candidates, candidate_scores = candidates[allowed], candidate_scores[allowed]
        order = np.argsort(-candidate_scores, kind="stable")[mining.range_min : depth]
        if mining.sampling_strategy == "random" and len(order) > mining.num_negatives:
            sample = generator.sample(range(len(order)), mining.num_negatives)
            order = order[sorted(sample)]
        order = order[: mining.num_negatives]
        complete += len(order) == mining.num_negatives
        negatives = [documents[index] for index in candidates[order]]
        rows += _rows(
            query,
            [documents[index] for index in known],
            negatives,
            positive_scores.tolist(),
            candidate_scores[order].tolist(),
            mining,
            names,
        )
    if complete < len(queries):
        logger.warning(
            "%d of %d queries have fewer than %d negatives that pass the filters. Use a larger "
            "range_max or weaker filters",
            *(len(queries) - complete, len(queries), mining.num_negatives),
        )
    return rows


def _accepted(scores: np.ndarray, positive_scores: np.ndarray, mining: Mining) -> np.ndarray:
    """Returns which candidates pass the filters."""
    accepted = np.ones(len(scores), bool)
    lowest = positive_scores.min()
    if mining.absolute_margin is not None:
        accepted &= scores + np.float32(mining.absolute_margin) <= lowest
    if mining.relative_margin is not None:
        accepted &= scores <= lowest - abs(lowest) * np.float32(mining.relative_margin)
    if mining.max_score is not None:
        accepted &= scores <= mining.max_score
    if mining.min_score is not None:
        accepted &= scores >= mining.min_score
    return accepted


def _rows(
    query: str,
    positives: Sequence[str],
    negatives: Sequence[str],
    positive_scores: Sequence[float],
    negative_scores: Sequence[float],
    mining: Mining,
    names: tuple[str, str],
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the result that belong to a query."""
    anchor_name, document_name = names
    style, with_scores = mining.output_format, mining.output_scores
    scored_positives = list(zip(positives, positive_scores, strict=True))
    if style == "labeled-pair":
        pairs = [(*pair, 1) for pair in scored_positives]
        pairs += [(*pair, 0) for pair in zip(negatives, negative_scores, strict=True)]
        for text, score, label in pairs:
            value = {"score": score} if with_scores else {"label": label}
            yield {anchor_name: query, document_name: text, **value}
        return
    for positive, score in scored_positives:
        row: dict[str, Any] = {anchor_name: query, document_name: positive}
        if style == "triplet":
            for negative, negative_score in zip(negatives, negative_scores, strict=True):
                scores = {"scores": [score, negative_score]} if with_scores else {}
                yield {**row, "negative": negative, **scores}
        elif style == "n-tuple":
            if len(negatives) < mining.num_negatives:
                continue  # all rows must have the same columns
            columns = {f"negative_{n}": text for n, text in enumerate(negatives, 1)}
            scores = {"scores": [score, *negative_scores]} if with_scores else {}
            yield {**row, **columns, **scores}
        elif negatives:
            values: dict[str, Any] = {"labels": [1] + [0] * len(negatives)}
            if with_scores:
                values = {"scores": [score, *negative_scores]}
            yield {anchor_name: query, document_name: [positive, *negatives], **values}
