"""The final weights of a run: the last, the best, or the mean of the last checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.training.arguments import TrainingArguments
from hfseq.training.checkpointer import Checkpointer


def saved(loop):
    """The weights in the output directory, by path."""
    from hfseq import FlaxRobertaForMaskedLM

    return trees.flatten(FlaxRobertaForMaskedLM.from_pretrained(str(loop.folder)).params)


def restored(loop, step):
    return Checkpointer(loop.folder).restore(step, loop.run.abstract_state())


def evaluations(loop):
    records = map(json.loads, (loop.folder / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]


@pytest.mark.slow
def test_the_mean_of_the_last_checkpoints_is_saved_and_evaluated(train):
    loop = train(save_steps=2, max_steps=6, average_checkpoints=2, eval_steps=6)
    parts = [trees.flatten(restored(loop, step).params) for step in (4, 6)]
    for path, leaf in saved(loop).items():
        mean = (np.asarray(parts[0][path]) + np.asarray(parts[1][path])) / 2
        np.testing.assert_allclose(np.asarray(leaf), mean, rtol=1e-6, atol=1e-7)
    (last, last_loss), (again, mean_loss) = evaluations(loop)
    assert (last, again) == (6, 6) and last_loss != mean_loss
    results = json.loads((loop.folder / "eval_results.json").read_text())
    assert results["eval_loss"] == mean_loss


@pytest.mark.slow
def test_resumed_run_averages_but_continues_from_its_state(train):
    options = {"save_steps": 2, "average_checkpoints": 2, "eval_steps": 100, "learning_rate": 1e-3}
    train("two", max_steps=4, lr_scheduler_type="constant", **options)
    resumed = train("two", max_steps=6, lr_scheduler_type="constant", **options)
    uninterrupted = train("one", max_steps=6, lr_scheduler_type="constant", **options)
    pairs = zip(saved(resumed).items(), saved(uninterrupted).items(), strict=True)
    for (path, first), (_, other) in pairs:
        np.testing.assert_array_equal(np.asarray(first), np.asarray(other), str(path))


@pytest.mark.slow
def test_results_refer_to_the_best_weights(train):
    loop = train(
        save_steps=2,
        eval_steps=2,
        max_steps=6,
        load_best_model_at_end=True,
        learning_rate=30.0,
        max_grad_norm=1.0,
    )
    logged_evaluations = evaluations(loop)
    best = min(loss for _, loss in logged_evaluations)
    assert (
        logged_evaluations[-1][1] == pytest.approx(best, rel=1e-6) and loop.progress.best_step != 6
    )
    results = json.loads((loop.folder / "eval_results.json").read_text())
    assert results["eval_loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end are mutually exclusive"),
        ({"average_checkpoints": 3}, "--average_checkpoints 3 .*--save_total_limit 2"),
        ({"average_checkpoints": 0}, "at least 1"),
    ],
)
def test_averages_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        TrainingArguments(**{"output_dir": "x", "average_checkpoints": 2} | changes)


@pytest.mark.slow
def test_of_scales_the_largest_counts_not_the_mean(train):
    loop = train(
        save_steps=1,
        max_steps=2,
        average_checkpoints=2,
        precision="fp8_delayed",
        fp8_amax_history_length=4,
        do_train=True,
    )
    parts = [trees.flatten(restored(loop, step).extra) for step in (1, 2)]
    for path, leaf in trees.flatten(loop.state.extra).items():
        assert np.array_equal(leaf, np.maximum(parts[0][path], parts[1][path])), path
