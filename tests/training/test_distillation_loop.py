"""Training runs with a teacher."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from tests.training.conftest import assert_same, check_resume, losses


@pytest.fixture(scope="module")
def teachers():
    """Directories of teachers by objective."""
    return {}


@pytest.fixture
def distill(train, teachers):
    """Returns a function that trains a student of a teacher with the same architecture."""

    def run(output, objective, **changes):
        if objective not in teachers:
            teachers[objective] = train("teacher", 1, objective, max_steps=2).folder
        defaults = {"teacher": teachers[objective], "distillation_temperature": 2.0, "max_steps": 2}
        return train(output, 1, objective, **{**defaults, **changes})

    return run


@pytest.mark.parametrize(
    "objective",
    ["clm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlm", "translation"))],
)
def test_distillation_does_not_depend_on_micro_batches(distill, objective):
    hidden = {"hidden_state_weight": 1.0}
    whole, parts = (
        distill(f"micro-{count}", objective, gradient_accumulation_steps=count, **hidden)
        for count in (1, 4)
    )
    assert_same(losses(whole.folder), losses(parts.folder))
    expected = {"eval_loss", "eval_distillation_loss", "eval_hidden_state_distance"}
    assert expected <= whole.metrics.keys()


def test_a_student_that_equals_its_teacher_has_no_distillation_loss(distill, teachers):
    distill("first", "clm")
    start = {"model_type": None, "config_overrides": None, "model_name_or_path": teachers["clm"]}
    same = distill("same", "clm", do_eval=True, output_dir=teachers["clm"], **start)
    assert same.metrics["eval_distillation_loss"] == pytest.approx(0, abs=1e-6)
    total = same.metrics["eval_total_loss"]
    assert total == pytest.approx(0.5 * same.metrics["eval_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse_kl", "jsd", "mse"])
def test_other_divergences_train(distill, loss):
    run = distill("run", "clm", distillation_loss=loss, teacher_dtype="bfloat16")
    assert np.isfinite(list(losses(run.folder).values())).all()
    leaves = run.run.frozen["auxiliary"]["teacher"]
    import jax

    assert {leaf.dtype.name for leaf in jax.tree.leaves(leaves)} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_resume_is_bit_exact(distill, objective):
    def run(output, callbacks=(), **options):
        return distill(output, objective, callbacks=callbacks, **options)

    distill("first", objective)
    check_resume(run, save_steps=2, max_steps=5)


def test_losses_for_embeddings_are_refused_elsewhere(distill):
    with pytest.raises(UsageError, match="--distillation_loss cosine: .* supports forward_kl"):
        distill("wrong", "clm", distillation_loss="cosine")
