"""Which evaluations select the best checkpoint, and by which metric."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import UsageError
from hfseq.training import callbacks, evaluation
from hfseq.training.arguments import TrainingArguments
from hfseq.training.callbacks import Evaluate, StepInfo, update_best_metric
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import check_best_metric
from hfseq.training.trackers import Trackers

BATCHES = [0] * 3


def flags(**changes):
    options = {"eval_strategy": "steps", "eval_steps": 1, "do_train": True}
    return TrainingArguments(output_dir="run", **(options | changes))


def evaluate(monkeypatch, training, limit):
    """The best metric after an evaluation of a split with three batches."""
    is_complete = limit is None or limit >= len(BATCHES)
    result = evaluation.Evaluation({"eval_loss": 2.0}, {}, None, is_complete)
    monkeypatch.setattr(callbacks.evaluation, "evaluate", lambda *_: result)
    run = SimpleNamespace(
        arguments=SimpleNamespace(training=training), data=SimpleNamespace(evaluation=BATCHES)
    )
    progress = Progress(step=1)
    Evaluate(Trackers()).evaluate(StepInfo(run, None, progress), limit)
    return progress.best_metric


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("eval_loss", 1.0),
        ("auxiliary_loss", 1.0),
        ("perplexity", 1.0),
        ("bits_per_byte", 1.0),
        ("eval_word_perplexity", 1.0),
        ("accuracy", 2.0),
        ("eval_code_perplexity", 2.0),
    ],
)
def test_the_direction_of_a_metric_follows_from_its_name(name, best):
    one_way, other_way = Progress(step=1), Progress(step=1)
    for progress, values in ((one_way, (2.0, 1.0)), (other_way, (1.0, 2.0))):
        for value in values:
            metrics = {f"eval_{name.removeprefix('eval_')}": value}
            update_best_metric(flags(metric_for_best_model=name), progress, metrics)
    assert one_way.best_metric == other_way.best_metric == best


@pytest.mark.parametrize(
    ("training", "limit", "counts"),
    [
        ({}, None, True),
        ({"max_eval_batches": 2}, 2, True),
        ({"max_eval_batches": 2}, None, False),  # the others were of a part
        ({"max_eval_batches": 3}, None, True),  # a part that is the whole
        ({"max_eval_batches": 3}, 3, True),
        ({"max_eval_batches": 2, "eval_strategy": "no"}, None, True),
    ],
)
def test_partial_and_full_evaluations_are_not_compared(monkeypatch, training, limit, counts):
    assert evaluate(monkeypatch, flags(**training), limit) == (2.0 if counts else None)


def test_partial_generation_metrics_do_not_select():
    objective = SimpleNamespace(reported_metrics=lambda split: None)
    wrong = {"metric_for_best_model": "eval_word_perplexity", "max_eval_batches": 2}
    with pytest.raises(UsageError, match="word_perplexity .* --max_eval_batches 2, .* 3 .* loss"):
        check_best_metric(flags(**wrong), objective, None, BATCHES)
    alone = {"do_train": False, "do_eval": True}
    for change in ({"max_eval_batches": 3}, {"eval_strategy": "no"}, alone):
        check_best_metric(flags(**(wrong | change)), objective, None, BATCHES)
