"""Generated texts: scores, samples and files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import UsageError
from hfseq.objectives.base import GeneratedTexts
from hfseq.training import evaluation
from hfseq.training.arguments import TrainingArguments
from hfseq.training.callbacks import Evaluate, StepInfo
from hfseq.training.checkpointer import Progress
from hfseq.training.trackers import Trackers

WRITTEN = GeneratedTexts(
    [f"source {i}" for i in range(10)],
    [f"reference {i}" for i in range(10)],
    [f"text {i}\nand more | {i}" for i in range(10)],
    {"bleu": 12.5, "chrf": 40.0},
    {"bleu": "nrefs:1"},
)


@pytest.fixture
def tracker():
    """A tracker that stores all records."""
    records = SimpleNamespace(shown=[], reported_metrics=[])
    records.text = lambda tag, text, step: records.shown.append((tag, text, step))
    records.log = lambda metrics, step: records.reported_metrics.append((metrics, step))
    return records


@pytest.fixture
def info(tmp_path):
    """A step of a run that generates texts and does not evaluate rows."""
    run = SimpleNamespace(
        objective=SimpleNamespace(generate_texts=lambda model, params, split: WRITTEN),
        model=SimpleNamespace(extra={}),
        frozen={},
        layout=SimpleNamespace(cut=lambda path, leaf: leaf),
        arguments=SimpleNamespace(
            data=SimpleNamespace(text_samples=3), training=TrainingArguments(output_dir="run")
        ),
        data=SimpleNamespace(evaluation=None, test=None),
        folder=tmp_path,
    )
    params = {"a": {"kernel": 1}}
    state = SimpleNamespace(params=params, inference_params=params, extra={})
    return StepInfo(run, state, Progress(step=7))


def test_scores_are_named_after_the_split(info):
    measured = evaluation.evaluate(info.run, info.state, "validation").metrics
    assert measured.pop("eval_generation_runtime") >= 0
    assert measured == {"eval_bleu": 12.5, "eval_chrf": 40.0}


def test_samples_are_logged_and_predictions_are_one_line_each(info, tracker, capsys):
    Evaluate(Trackers([tracker])).predict(info)
    ((tag, text, step),) = tracker.shown
    assert (tag, step) == ("predict_samples", 7)
    assert text.splitlines()[2:] == [
        f"| source {i} | reference {i} | text {i} and more \\| {i} |" for i in (0, 3, 6)
    ]
    lines = (info.run.folder / "generated_predictions.txt").read_text().splitlines()
    assert lines == [f"text {i} and more | {i}" for i in range(10)]
    references = (info.run.folder / "generated_references.txt").read_text().splitlines()
    assert references == WRITTEN.references
    assert (
        tracker.reported_metrics[0][0]["predict_bleu"] == 12.5
        and tracker.reported_metrics[0][1] == 7
    )
    assert info.metrics["predict_bleu"] == 12.5
    assert "predict_bleu: 12.5" in capsys.readouterr().out


def test_objective_without_generation_adds_no_files(info):
    info.run.objective.generate_texts = lambda model, params, split: None
    result = evaluation.evaluate(info.run, info.state, "validation")
    assert result.metrics == {} and result.texts is None


def test_samples_are_logged_only_on_request(info, tracker):
    info.run.arguments.data.text_samples = 0
    Evaluate(Trackers([tracker])).predict(info)
    assert not tracker.shown and tracker.reported_metrics


def test_do_predict_requires_a_test_split(train):
    with pytest.raises(UsageError, match="--do_predict: .*'mlm' .* test split.* clm"):
        train(do_predict=True)
