"""Training runs with a teacher."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import hfseq
from hfseq.errors import UsageError
from tests.training.conftest import assert_same, check_resume, losses


def metric_values(folder, name) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if name in record]


@pytest.fixture(scope="module")
def teachers():
    """Directories of teachers by objective."""
    return {}


@pytest.fixture
def teacher(train, teachers):
    """Returns a function that trains the teacher of an objective when it is first called."""

    def find(objective):
        if objective not in teachers:
            options = {"max_steps": 2, "do_train": True}
            teachers[objective] = train("teacher", 1, objective, **options).folder
        return teachers[objective]

    return find


@pytest.fixture
def distill(train, teacher):
    """Returns a function that trains a student of a teacher with the same architecture."""

    def run(output, objective, **changes):
        options = {"teacher": teacher(objective), "distillation_temperature": 2.0, "max_steps": 2}
        return train(output, 1, objective, **{**options, **changes})

    return run


@pytest.mark.parametrize(
    "objective",
    ["clm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlm", "translation"))],
)
def test_distillation_does_not_depend_on_micro_batches(distill, objective):
    hidden = {"hidden_state_weight": 1.0, "attention_weight": 1.0}
    whole, parts = (
        distill(f"micro-{count}", objective, gradient_accumulation_steps=count, **hidden)
        for count in (1, 4)
    )
    assert_same(losses(whole.folder), losses(parts.folder))
    inner = {"eval_hidden_state_distance", "eval_attention_divergence"}
    assert {"eval_loss", "eval_distillation_loss", *inner} <= whole.metrics.keys()


def test_a_student_that_equals_its_teacher_has_no_distillation_loss(distill, teacher):
    start = {"model_type": None, "config_overrides": None, "model_name_or_path": teacher("clm")}
    weights = {"hidden_state_weight": 1.0, "attention_weight": 1.0}
    same = distill("same", "clm", do_eval=True, output_dir=teacher("clm"), **start, **weights)
    for name in ("distillation_loss", "hidden_state_distance", "attention_divergence"):
        assert same.metrics[f"eval_{name}"] == pytest.approx(0, abs=1e-6), name
    total = same.metrics["eval_total_loss"]
    assert total == pytest.approx(0.5 * same.metrics["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_narrower_student_learns_hidden_states_through_a_map_that_is_not_saved(distill, tmp_path):
    narrow = "n_embd=16,n_layer=1,n_head=4,n_positions=40"

    def run(output, callbacks=(), **options):
        flags = {"hidden_state_weight": 1.0, "config_overrides": narrow, "learning_rate": 1e-2}
        return distill(output, "clm", callbacks=callbacks, **flags, **options)

    trained = run("narrow", max_steps=20)
    steps = metric_values(trained.folder, "train_hidden_state_distance")
    assert steps[-1] < 0.8 * steps[0]
    assert trained.state.params["sentence_modules"]["projection"]["kernel"].shape == (16, 32)
    saved = hfseq.FlaxAutoModelForCausalLM.from_pretrained(trained.folder)
    assert "sentence_modules" not in saved.params
    names = load_file(trained.folder / "model.safetensors").keys()
    assert not [name for name in names if "projection" in name]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(saved.params))
    assert json.loads((trained.folder / "run.json").read_text())["parameters"] == parameters
    check_resume(run, save_steps=2, max_steps=5)


@pytest.mark.slow
def test_attention_weights_of_other_heads_are_refused(distill):
    overrides = "n_embd=32,n_layer=1,n_head=2,n_positions=40"
    with pytest.raises(UsageError, match="--attention_weight: .*same number of attention heads"):
        distill("heads", "clm", attention_weight=1.0, config_overrides=overrides)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse_kl", "jsd", "mse"])
def test_other_divergences_train(distill, loss):
    run = distill("run", "clm", distillation_loss=loss, teacher_dtype="bfloat16")
    assert np.isfinite(list(losses(run.folder).values())).all()
    leaves = run.run.frozen["auxiliary"]["teacher"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(leaves)} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_resume_is_bit_exact(distill, objective):
    def run(output, callbacks=(), **options):
        return distill(output, objective, callbacks=callbacks, **options)

    check_resume(run, save_steps=2, max_steps=5)


def test_losses_for_embeddings_are_refused_elsewhere(distill):
    with pytest.raises(UsageError, match="--distillation_loss cosine: .* supports forward_kl"):
        distill("wrong", "clm", distillation_loss="cosine")
