"""Which evaluations choose the best checkpoint, and by what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import UsageError
from hfseq.training import evaluation
from hfseq.training.checkpointer import Progress


def loop_with(**training):
    options = {
        "metric_for_best_model": "eval_loss", "greater_is_better": None, "max_eval_batches": None,
        "eval_strategy": "steps", "do_train": True,
    }  # fmt: skip
    return SimpleNamespace(
        training=SimpleNamespace(**(options | training)), progress=Progress(step=1),
        data=SimpleNamespace(evaluation=[0] * 3), evaluated_step=-1, metrics={},
        report=lambda measured, step: None,
        objective=SimpleNamespace(reported=lambda split: None),
    )  # fmt: skip


def evaluate(monkeypatch, loop, limit=None):
    monkeypatch.setattr(evaluation, "_measure", lambda *_: ({"eval_loss": 2.0}, {}))
    monkeypatch.setattr(evaluation.writing, "write", lambda *_: {})
    evaluation.evaluate(loop, limit)
    return loop.progress.best_metric


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("eval_loss", 1.0), ("auxiliary_loss", 1.0), ("perplexity", 1.0), ("bits_per_byte", 1.0),
        ("eval_word_perplexity", 1.0), ("accuracy", 2.0), ("eval_code_perplexity", 2.0),
    ],
)  # fmt: skip
def test_the_direction_of_a_metric_follows_from_its_name(name, best):
    loop = loop_with(metric_for_best_model=name)
    for value in (2.0, 1.0):
        evaluation.note_best(loop, {f"eval_{name.removeprefix('eval_')}": value})
    one_way = loop.progress.best_metric
    loop.progress = Progress(step=1)
    for value in (1.0, 2.0):
        evaluation.note_best(loop, {f"eval_{name.removeprefix('eval_')}": value})
    assert one_way == loop.progress.best_metric == best


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
def test_evaluations_of_a_part_and_of_the_whole_are_not_compared(
    monkeypatch, training, limit, counts
):
    assert evaluate(monkeypatch, loop_with(**training), limit) == (2.0 if counts else None)


def test_the_words_of_a_part_choose_nothing():
    wrong = {"metric_for_best_model": "eval_word_perplexity", "max_eval_batches": 2}
    with pytest.raises(UsageError, match="max_eval_batches 2 reads a part of the 3 .* by loss"):
        evaluation.check_metric(loop_with(**wrong))
    for change in ({"max_eval_batches": 3}, {"eval_strategy": "no"}, {"do_train": False}):
        evaluation.check_metric(loop_with(**(wrong | change)))
