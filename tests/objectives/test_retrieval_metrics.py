"""Metrics of retrieval, compared with scikit-learn and sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import DataError
from hfseq.objectives import retrieval_metrics as metrics


def random_case(draw):
    """Returns scores with many ties, and labels with at least one 1."""
    count = int(draw.integers(2, 14))
    scores = draw.integers(0, 4, count) / 4 if draw.random() < 0.7 else draw.normal(size=count)
    labels = (draw.random(count) < 0.4).astype(int)
    labels[draw.integers(count)] = 1
    return scores, labels


def test_ndcg_and_average_precision_equal_scikit_learn_with_ties():
    sklearn = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    for _ in range(200):
        scores, labels = random_case(draw)
        expected = sklearn.ndcg_score([labels], [scores], k=5)
        assert metrics.ndcg(scores, labels, 5) == pytest.approx(expected, abs=1e-12)
        expected = sklearn.average_precision_score(labels, scores)
        assert metrics.average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_search_metrics_have_their_definitions():
    ranking = [["a", "b", "c", "d"], ["e", "f"], ["x"]]
    relevant = [{"b", "d", "z"}, {"e"}, {"y"}]
    result = metrics.retrieval_metrics(ranking, relevant, precision_at=(1, 3), map_at=(3,))
    log = np.log2
    ideal = 1 + 1 / log(3) + 1 / log(4)
    expected = {
        "accuracy@1": 1 / 3,
        "accuracy@3": 2 / 3,
        "precision@3": (1 / 3 + 1 / 3) / 3,
        "recall@3": (1 / 3 + 1) / 3,
        "mrr@10": (1 / 2 + 1) / 3,
        "ndcg@10": ((1 / log(3) + 1 / log(5)) / ideal + 1) / 3,
        "map@3": ((1 / 2) / 3 + 1) / 3,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_documents_of_equal_score_are_ranked_by_their_ids():
    scores = np.array([[1.0, 2.0, 2.0, 2.0]])
    assert metrics.rank_documents(scores, ["a", "d", "b", "c"], 3) == [["b", "c", "d"]]


def test_the_reciprocal_rank_of_ties_depends_on_the_kind_of_model():
    scores, labels = np.zeros(4), [1, 0, 0, 0]
    assert metrics.reranking_scores(scores, labels)[1] == 1
    assert metrics.reranking_scores(scores, labels, ties="last")[1] == 1 / 4
    assert metrics.reranking_scores(scores, [0] * 4) == (0, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.reranking_metrics([np.array([1, np.nan])], [[0, 1]]),
        lambda: metrics.similarity_metrics(np.array([1, np.nan]), np.array([0, 1])),
        lambda: metrics.pair_classification_metrics(np.array([np.nan, 1]), np.array([0, 1])),
        lambda: metrics.rank_documents(np.array([[np.nan]]), ["a"]),
    ],
)
def test_scores_that_are_not_numbers_are_rejected(call):
    with pytest.raises(DataError, match="1 of . .* not numbers"):
        call()


def test_labels_other_than_0_and_1_are_rejected():
    with pytest.raises(DataError, match="must be 0 or 1"):
        metrics.pair_classification_metrics(np.zeros(2), np.array([0, 2]))


def test_fusion_adds_reciprocal_ranks():
    fused = metrics.reciprocal_rank_fusion([["a", "b"], ["b", "c"]])
    assert [name for name, _ in fused] == ["b", "a", "c"]
    assert fused[0][1] == 1 / 62 + 1 / 61


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # sentence-transformers
def test_metrics_equal_sentence_transformers_on_random_cases_with_ties():
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    from sentence_transformers.sentence_transformer import evaluation
    from sklearn.metrics import f1_score, matthews_corrcoef

    draw = np.random.default_rng(1)
    reranker = CrossEncoderRerankingEvaluator(
        [{"query": "q", "positive": ["a"], "negative": ["b"]}]
    )
    classifier = evaluation.BinaryClassificationEvaluator
    for _ in range(1000):
        scores, labels = random_case(draw)
        mrr, ndcg, ap = reranker.compute_metrics(labels, scores)
        ours = metrics.reranking_scores(scores, labels, ties="last")
        assert ours == pytest.approx((ap, mrr, ndcg), abs=1e-9)
        for better in (True, False):
            ours = metrics.pair_classification_metrics(scores, labels, greater_is_better=better)
            accuracy = classifier.find_best_acc_and_threshold(scores, labels, better)
            f1 = classifier.find_best_f1_and_threshold(scores, labels, better)
            names = ("accuracy", "accuracy_threshold", "f1", "precision", "recall", "f1_threshold")
            assert [ours[name] for name in names] == pytest.approx([*accuracy, *f1], abs=1e-9)
            predicted = scores >= f1[3] if better else scores <= f1[3]
            assert ours["mcc"] == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-9)
        logits, classes = draw.integers(0, 3, (9, 3)) / 2, draw.integers(0, 3, 9)
        ours = metrics.multi_label_metrics(logits, classes)
        for average in ("macro", "micro", "weighted"):
            expected = f1_score(classes, logits.argmax(1), average=average)
            assert ours[f"f1_{average}"] == pytest.approx(expected, abs=1e-9)
    queries = {f"q{n}": f"q{n}" for n in range(6)}
    corpus = {f"d{n}": f"d{n}" for n in range(120)}
    for _ in range(100):
        relevant = {q: {f"d{n}" for n in draw.integers(0, 120, 3)} for q in queries}
        matrix = draw.integers(0, 6, (6, 120)) / 3
        ranking = metrics.rank_documents(matrix, list(corpus))
        evaluator = evaluation.InformationRetrievalEvaluator(queries, corpus, relevant)
        hits = [
            [{"corpus_id": name, "score": matrix[row][int(name[1:])]} for name in names]
            for row, names in enumerate(ranking)
        ]
        theirs = evaluator.compute_metrics(hits)
        expected = {
            name.replace("@k", f"@{k}"): value
            for name, values in theirs.items()
            for k, value in values.items()
        }
        ours = metrics.retrieval_metrics(ranking, [relevant[q] for q in queries])
        assert ours == pytest.approx(expected, abs=1e-9)
