"""Texts that a model writes: scores, samples and files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import UsageError
from hfseq.objectives.base import Texts
from hfseq.training import evaluation

WRITTEN = Texts(
    [f"source {i}" for i in range(10)],
    [f"reference {i}" for i in range(10)],
    [f"text {i}\nand more | {i}" for i in range(10)],
    {"bleu": 12.5, "chrf": 40.0},
    {"bleu": "nrefs:1"},
)


@pytest.fixture
def loop(tmp_path):
    reported, shown = [], []
    tracker = SimpleNamespace(text=lambda tag, text, step: shown.append((tag, text, step)))
    return SimpleNamespace(
        objective=SimpleNamespace(write_texts=lambda model, params, split: WRITTEN),
        model=SimpleNamespace(extra={}), state={"params": {"a": {"kernel": 1}}, "extra": {}},
        notes={}, trackers=[tracker],
        layout=SimpleNamespace(cut=lambda path, leaf: leaf), folder=tmp_path,
        arguments=SimpleNamespace(data=SimpleNamespace(text_samples=3)),
        progress=SimpleNamespace(step=7), written=None, shown=shown, reported=reported,
        report=lambda metrics, step: reported.append((metrics, step)),
    )  # fmt: skip


def test_scores_are_named_after_the_split_and_samples_go_to_the_trackers(loop):
    measured = evaluation.write(loop, "validation")
    assert measured.pop("eval_generation_runtime") >= 0
    assert measured == {"eval_bleu": 12.5, "eval_chrf": 40.0}
    ((tag, text, step),) = loop.shown
    assert (tag, step) == ("eval_samples", 7)
    assert text.splitlines()[2:] == [
        f"| source {i} | reference {i} | text {i} and more \\| {i} |" for i in (0, 3, 6)
    ]


def test_predictions_are_one_line_each_beside_their_references(loop, capsys):
    evaluation.predict_texts(loop)
    lines = (loop.folder / "generated_predictions.txt").read_text().splitlines()
    assert lines == [f"text {i} and more | {i}" for i in range(10)]
    references = (loop.folder / "generated_references.txt").read_text().splitlines()
    assert references == WRITTEN.references
    assert loop.reported[0][0]["predict_bleu"] == 12.5 and loop.reported[0][1] == 7
    assert "predict_bleu: 12.5" in capsys.readouterr().out


def test_an_objective_that_writes_nothing_adds_nothing(loop):
    loop.objective = SimpleNamespace(write_texts=lambda model, params, split: None)
    assert evaluation.write(loop, "validation") == {} and not loop.shown


def test_no_samples_are_logged_where_none_are_asked_for(loop):
    loop.arguments.data.text_samples = 0
    evaluation.write(loop, "validation")
    assert not loop.shown


def test_predicting_is_refused_where_an_objective_has_no_test_split(train):
    with pytest.raises(UsageError, match=r"clm \(its loss\) and translation"):
        train(do_predict=True)
