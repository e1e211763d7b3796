"""Classification and regression metrics agree with scikit-learn and SciPy."""

from __future__ import annotations

import math
import sys
import types
import warnings

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.objectives.metrics import METRICS, compute_metrics, f1, load_metric

sklearn = pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")


def classes(count: int, seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    references = random.integers(0, count, size)
    noise = random.integers(0, count, size)
    return np.where(random.random(size) < 0.6, references, noise), references


def score(name: str, predictions: np.ndarray, references: np.ndarray) -> float:
    return load_metric(name).compute(predictions=predictions, references=references)[name]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [2, 5])
def test_scores_of_classes_are_those_of_scikit_learn(count, seed):
    predictions, references = classes(count, seed)
    expected = {
        "accuracy": sklearn.accuracy_score(references, predictions),
        "f1_macro": sklearn.f1_score(references, predictions, average="macro"),
        "matthews_correlation": sklearn.matthews_corrcoef(references, predictions),
    }
    if count == 2:
        expected["f1"] = sklearn.f1_score(references, predictions)
    for name, value in expected.items():
        assert score(name, predictions, references) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize(
    ("predictions", "references"),
    [([1, 1, 1], [1, 0, 1]), ([0, 0, 0], [1, 0, 1]), ([1, 0, 1], [1, 1, 1]), ([0, 0], [0, 0])],
)
def test_single_class_metrics_match_scikit_learn(predictions, references):
    actual, right = np.array(predictions), np.array(references)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert score("f1", actual, right) == sklearn.f1_score(right, actual, zero_division=0)
        macro = sklearn.f1_score(right, actual, average="macro", zero_division=0)
        assert score("f1_macro", actual, right) == pytest.approx(macro)
        expected = sklearn.matthews_corrcoef(right, actual)
    assert score("matthews_correlation", actual, right) == expected == 0.0


def test_a_class_that_only_predictions_have_counts_in_the_macro_mean():
    actual, right = np.array([0, 2, 1, 1]), np.array([0, 0, 1, 1])
    expected = sklearn.f1_score(right, actual, average="macro", zero_division=0)
    assert score("f1_macro", actual, right) == pytest.approx(expected)


def test_binary_f1_uses_the_positive_class():
    actual, right = classes(2, 0)
    assert f1(actual, right, pos_label=0) == pytest.approx(
        sklearn.f1_score(right, actual, pos_label=0)
    )
    with pytest.raises(UsageError, match="two classes.*are 5.*f1_macro"):
        f1(*classes(5, 0))
    with pytest.raises(UsageError, match="binary, macro or micro"):
        f1(actual, right, average="weighted")


@pytest.mark.parametrize("digits", [0, 1, 6])  # few digits give equal values
def test_correlations_are_those_of_scipy(digits):
    random = np.random.default_rng(digits)
    references = random.normal(size=80).round(digits)
    predictions = (references + random.normal(size=80)).round(digits).astype(np.float32)
    assert score("pearson", predictions, references) == pytest.approx(
        stats.pearsonr(predictions.astype(np.float64), references).statistic, abs=1e-12
    )
    assert score("spearmanr", predictions, references) == pytest.approx(
        stats.spearmanr(predictions, references).statistic, abs=1e-12
    )


@pytest.mark.parametrize("name", ["pearson", "spearmanr"])
def test_a_constant_has_no_correlation(name):
    assert math.isnan(score(name, np.full(7, 0.1), np.arange(7.0)))
    assert math.isnan(score(name, np.arange(7.0), np.full(7, 3.0)))


@pytest.mark.parametrize("name", METRICS)
def test_predictions_and_references_go_together(name):
    with pytest.raises(UsageError, match=f"{name}: .* one prediction per reference"):
        score(name, np.zeros(3), np.zeros(4))
    with pytest.raises(UsageError, match="at least one"):
        score(name, np.zeros(0), np.zeros(0))


def test_a_metric_of_another_name_comes_from_evaluate(monkeypatch):
    class Theirs:
        def compute(self, *, predictions, references):
            return {"kappa": np.float64(len(predictions)), "table": [[1]]}

    fake = types.SimpleNamespace(load=lambda name: Theirs())
    monkeypatch.setitem(sys.modules, "evaluate", fake)
    actual, right = classes(2, 0)
    scores = compute_metrics([METRICS["accuracy"], load_metric("cohen_kappa")], actual, right)
    assert scores == {"accuracy": np.mean(actual == right), "kappa": 200.0}


def test_unknown_metric_error_lists_the_metrics(monkeypatch):
    def load(name):
        raise FileNotFoundError(f"no {name}")

    monkeypatch.setitem(sys.modules, "evaluate", types.SimpleNamespace(load=load))
    with pytest.raises(UsageError, match=r"--metrics acuracy: .*no acuracy.* accuracy, f1"):
        load_metric("acuracy")
