"""Scores of entities and answers compared with reference implementations and known values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hfseq.data.question_answering import best_spans
from hfseq.objectives.metrics import answer_scores, entity_scores, find_entities, rouge_scores

KINDS = ("PER", "LOC", "ORG-X")
TAGS = ["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in KINDS)]


def test_entities_match_conlleval():
    assert find_entities(["B-PER", "I-PER", "O", "B-LOC"]) == {("PER", 0, 1), ("LOC", 3, 3)}
    assert find_entities(["I-PER", "I-LOC", "I-LOC"]) == {("PER", 0, 0), ("LOC", 1, 2)}  # IOB1
    assert find_entities(["B-PER", "B-PER", "I-LOC"]) == {
        ("PER", 0, 0),
        ("PER", 1, 1),
        ("LOC", 2, 2),
    }
    assert find_entities(["S-PER", "B-LOC", "E-LOC"]) == {("PER", 0, 0), ("LOC", 1, 2)}  # IOBES
    assert find_entities(["O", "O"]) == set() and find_entities([]) == set()
    scores = entity_scores([["B-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "B-LOC"]])
    assert scores["precision"] == scores["recall"] == scores["f1"] == 0.5
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert (scores["PER_f1"], scores["LOC_f1"], scores["PER_number"]) == (0.0, 1.0, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # its own, where nothing is an entity
def test_entity_scores_are_those_of_seqeval():
    seqeval = pytest.importorskip("seqeval.metrics")
    draw = random.Random(0)
    for _ in range(3000):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
        sides = [[draw.choices(TAGS, k=length) for length in lengths] for _ in range(2)]
        actual, expected = sides
        ours = entity_scores(actual, expected)
        report = seqeval.classification_report(expected, actual, output_dict=True, zero_division=0)
        for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert ours[name] == pytest.approx(report.get("micro avg", {theirs: 0})[theirs])
            for variant in KINDS:
                if variant in report:
                    assert ours[f"{variant}_{name}"] == pytest.approx(report[variant][theirs])
        assert ours["accuracy"] == pytest.approx(seqeval.accuracy_score(expected, actual))


def test_answers_are_compared_as_squad_does():
    assert answer_scores("The  Eiffel Tower!", ["Eiffel tower"]) == (1.0, 1.0)
    assert answer_scores("", []) == (1.0, 1.0)
    assert answer_scores("Paris", []) == (0.0, 0.0)
    assert answer_scores("", ["Paris"]) == (0.0, 0.0)
    assert answer_scores("the", ["Paris"]) == (0.0, 0.0)
    exact, f1 = answer_scores("in Paris", ["London", "Paris"])
    assert exact == 0.0 and f1 == pytest.approx(2 / 3)


def by_rules(actual: str, expected: list[str]) -> tuple[float, float]:
    """Computes SQuAD's scores letter by letter and word by word."""

    def words(text):
        text = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        return [word for word in text.split() if word not in ("a", "an", "the")]

    best = [0.0, 0.0]
    for item in expected:
        ours, theirs = words(actual), words(item)
        remainder, common = list(theirs), 0
        for word in ours:
            if word in remainder:
                remainder.remove(word)
                common += 1
        f1 = float(ours == theirs)
        if ours and theirs:
            f1 = 2 * common / (len(ours) + len(theirs))
        best = [max(best[0], float(ours == theirs)), max(best[1], f1)]
    return best[0], best[1]


def test_thousands_of_answers_have_the_scores_of_the_rules():
    draw = random.Random(1)
    words = ["a", "the", "An", "cat", "Cat,", "dog", "(dog)", "x-y", "7", "9.5", "tree"]
    for _ in range(4000):
        actual, *expected = (" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(3))
        expected = [item for item in expected if by_rules(item, [""])[0] == 0.0] or ["cat"]
        assert answer_scores(actual, expected) == pytest.approx(by_rules(actual, expected))


def test_the_best_spans_are_those_of_all_pairs():
    draw = np.random.default_rng(0)
    for _ in range(300):
        windows = int(draw.integers(1, 3))
        starts, ends = (list(draw.normal(size=(windows, 9))) for _ in range(2))
        spans = np.stack([np.arange(9) * 2, np.arange(9) * 2 + 1], 1)
        spans[:3] = -1  # the question
        actual, empty = best_spans(starts, ends, [spans] * windows, 4, 3)
        every = []
        for start, end in zip(starts, ends, strict=True):
            first, last = np.argsort(-start)[:4], np.argsort(-end)[:4]
            every += [
                (start[a] + end[b], spans[a, 0], spans[b, 1])
                for a in first
                for b in last
                if 3 <= a <= b < a + 3
            ]
        expected = sorted(every, reverse=True)[:4]
        ours = [(item.score, item.start, item.end) for item in actual]
        assert np.allclose(np.ravel(ours), np.ravel(expected))
        assert empty == pytest.approx(min(s[0] + e[0] for s, e in zip(starts, ends, strict=True)))


def test_rouge_lsum_splits_at_line_breaks():
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    item, other = "Ada sings. Bo is 3. He ran!", "He ran! Ada sang."
    lines = ("Ada sings.\nBo is 3.\nHe ran!", "He ran!\nAda sang.")
    expected = scorer.RougeScorer(["rougeLsum"], use_stemmer=True).score(lines[1], lines[0])
    assert (
        rouge_scores([item], [[other]]).values["rougeLsum"] == 100 * expected["rougeLsum"].fmeasure
    )
