"""Classification: losses and gradients per example, metrics, and prediction files."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hfseq.data.arguments import ClassificationArguments
from hfseq.data.batches import Batches
from hfseq.errors import DataError, UsageError
from hfseq.objectives.classification import Classification
from tests.objectives.conftest import numbers
from tests.support.models import bert_config, roberta_config, vq_transformer_config

PAIRS = [
    ("a cat sat there", "a dog", "yes"),
    ("the dog sat", "nobody sat", "no"),
    ("cats sit", "a cat", "yes"),
    ("a dog", "the dog", "no"),
    ("one cat and a dog", "two", "no"),
]


@pytest.fixture
def build_objective(tmp_path, tokenizer_of):
    """Returns a function from records to (objective, model, rows of validation)."""

    def make(records, config=None, family="bert", variant=None, **flags):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        tokenizer, config = tokenizer_of(family), config or bert_config
        files = {"train_file": [str(file)], "validation_file": [str(file)]}
        arguments = ClassificationArguments(**(files | flags))
        tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        config = config(num_hidden_layers=1, **tokens)
        Classification.configure_data(config, arguments, None)
        from hfseq import FlaxAutoModelForSequenceClassification

        model = FlaxAutoModelForSequenceClassification.from_config(config)
        objective = Classification(arguments, tokenizer, config)
        objective.prepare(model)
        rows, stats = objective.make_rows(objective.splits, "validation", 32)
        assert stats["documents"] == len(records)
        return objective, model, rows

    return make


def pairs(records=PAIRS):
    names = ("sentence1", "sentence2", "label")
    return [dict(zip(names, record, strict=True)) for record in records]


def scored(values):
    return [{"text": "a cat " * (i + 1), "label": v} for i, v in enumerate(values)]


def batch_of(objective, rows, size=8):
    actual = Batches(rows, size, 0, shuffle=False)[0]
    return objective.collate(actual, numbers(actual), 1)


def logits_of(model, tokenizer, first, second=None):
    inputs = dict(tokenizer(first, second, return_tensors="np", padding=True))
    call = jax.jit(lambda params, inputs: model(**inputs, params=params).logits)
    return np.asarray(call(model.params, inputs), np.float64)


def judged(objective, model, batch):
    """Returns the evaluation results of `loss`, compiled as one program."""
    step = jax.jit(lambda params, batch: objective.loss(model, params, batch, None, False))
    return step(model.params, batch)


@pytest.mark.slow
def test_loss_is_cross_entropy_without_padding_copies(
    build_objective,
):
    objective, model, rows = build_objective(pairs())
    assert model.config.num_labels == 2 and model.config.id2label == {0: "no", 1: "yes"}
    batch = batch_of(objective, rows)  # five examples and three copies of some
    assert batch["counts"].tolist() == [True] * 5 + [False] * 3
    assert set(np.unique(batch["token_type_ids"])) == {0, 1}
    first, second, labels = zip(*PAIRS, strict=True)
    logits = logits_of(model, objective.tokenizer, list(first), list(second))
    right = np.array([label == "yes" for label in labels], int)
    expected = (np.log(np.exp(logits).sum(1)) - logits[np.arange(5), right]).sum()
    total, count, extra = judged(objective, model, batch)
    assert float(total) == pytest.approx(expected, rel=1e-5) and int(count) == 5
    assert int(extra["totals"]["correct"]) == (logits.argmax(1) == right).sum()
    np.testing.assert_allclose(extra["totals"]["row_outputs"][:5], logits, atol=1e-5)


def test_the_loss_of_numbers_is_their_squared_error(build_objective):
    objective, model, rows = build_objective(scored([0.5, 1.5, 4.25]))
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    texts = [record["text"] for record in scored([1, 1, 1])]
    logits = logits_of(model, objective.tokenizer, texts)[:, 0]
    batch = batch_of(objective, rows)
    total, count, extra = judged(objective, model, batch)
    assert float(total) == pytest.approx(((logits - [0.5, 1.5, 4.25]) ** 2).sum(), rel=1e-5)
    assert int(count) == 3 and objective.sums == () and set(extra["totals"]) == {"row_outputs"}
    actual = objective.metrics({"loss": float(total), "count": 3.0})
    assert actual == {"loss": pytest.approx(float(total) / 3)}


@pytest.mark.parametrize("numbers", [False, True])
def test_gradients_are_those_of_pytorchs_loss(build_objective, tmp_path, numbers):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    records = scored([0.5, 1.5, 4.25]) if numbers else pairs()
    objective, model, rows = build_objective(records)
    batch = batch_of(objective, rows, len(records))
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    inputs = {name: torch.tensor(batch[name]) for name in names if name in batch}
    if not numbers:
        inputs["labels"] = inputs["labels"].long()
    output = theirs(**inputs)
    output.loss.backward()

    def mean(params):
        total, count, _ = objective.loss(model, params, batch, None, False)
        return total / count

    value, grads = jax.jit(jax.value_and_grad(mean))(model.params)
    assert float(value) == pytest.approx(output.loss.item(), rel=1e-5)
    kernel = np.asarray(grads["classifier"]["kernel"])
    np.testing.assert_allclose(kernel, theirs.classifier.weight.grad.numpy().T, atol=1e-5)
    table = grads["bert"]["embeddings"]["word_embeddings"]["embedding"]
    expected = theirs.bert.embeddings.word_embeddings.weight.grad.numpy()
    np.testing.assert_allclose(np.asarray(table), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (roberta_config, "roberta"),
        pytest.param(vq_transformer_config, "vq_transformer", marks=pytest.mark.slow),
    ],
)
def test_encoders_without_token_types_train_too(build_objective, config, family):
    objective, model, rows = build_objective(pairs(), config, family)
    batch = batch_of(objective, rows)
    assert "token_type_ids" not in batch
    key = jax.random.key(0)
    short = {name: value[:, :24] if value.ndim == 2 else value for name, value in batch.items()}

    def total(params, batch):
        return objective.loss(model, params, batch, key, True, extra=model.extra)[0]

    grads = jax.jit(jax.grad(total))(model.params, short)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert the_loss_is_that_of_any_padding(objective, model, batch)


def the_loss_is_that_of_any_padding(objective, model, batch):
    def widened(array):
        return np.pad(array, ((0, 0), (0, 8))) if array.ndim == 2 else array

    wide = {name: widened(array) for name, array in batch.items()}
    losses = [judged(objective, model, part)[0] for part in (batch, wide)]
    return float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)


def test_padding_copies_do_not_change_batch_statistics(build_objective):
    objective, model, rows = build_objective(pairs(), vq_transformer_config, "vq_transformer")
    key, extras = jax.random.key(0), []

    def after(params, batch):
        _, _, loss_extra = objective.loss(model, params, batch, key, True, extra=model.extra)
        return model.finalize_extra(loss_extra["extra"])

    for size in (5, 8):
        batch = batch_of(objective, rows, size)
        extras.append(jax.jit(after)(model.params, batch))
    flat = [jax.tree.leaves(extra) for extra in extras]
    for item, other in zip(*flat, strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-5, atol=1e-6)


def test_scores_are_of_all_rows_and_of_each_part(build_objective):
    objective, _, _ = build_objective(pairs(), metrics=["accuracy", "matthews_correlation"])
    objective.splits["validation"].parts = {"old": range(3), "new": range(3, 5)}
    right = [1, 0, 1, 0, 0]
    actual = [1, 0, 0, 0, 1]
    outputs = np.eye(2, dtype=np.float32)[actual]
    scores = objective.row_metrics({"row_outputs": outputs}, "validation")
    assert scores["accuracy"] == 0.6 and scores["old_accuracy"] == pytest.approx(2 / 3)
    assert scores["new_accuracy"] == 0.5 and -1 < scores["old_matthews_correlation"] < 1
    losses = np.log(1 + np.exp(np.where(np.array(actual) == right, -1.0, 1.0)))
    assert scores["old_loss"] == pytest.approx(losses[:3].mean())
    part = objective.row_metrics({"row_outputs": outputs[:4]}, "validation")
    assert part["accuracy"] == 0.75 and part["new_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("records", "flags", "expected"),
    [
        (pairs(), {}, ("accuracy", "f1", "matthews_correlation")),
        (scored(["a", "b", "c"]), {}, ("accuracy", "f1_macro", "matthews_correlation")),
        (scored([0.5, 1.5]), {}, ("pearson", "spearmanr")),
        (
            scored(["0", "1"]),
            {"task_name": "cola", "sentence1_column": "text"},
            ("matthews_correlation", "accuracy"),
        ),
        (pairs(), {"metrics": ["f1"]}, ("f1",)),
    ],
)
def test_metrics_are_those_of_the_task(build_objective, records, flags, expected):
    assert build_objective(records, **flags)[0].metric_names == expected


def test_predictions_are_written_with_names_of_classes_and_a_file_for_each_part(
    build_objective, tmp_path
):
    objective, _, _ = build_objective(pairs())
    objective.splits["test"] = SimpleNamespace(parts={})
    rows = {"row_outputs": np.array([[0.0, 1.0], [2.0, 1.0]])}
    objective.save_predictions(rows, "test", tmp_path)
    expected = "index\tprediction\n0\tyes\n1\tno\n"
    assert (tmp_path / "test_results.tsv").read_text() == expected
    objective.splits.task = "mnli"
    objective.splits["test"].parts = {"matched": range(1), "mismatched": range(1, 2)}
    objective.save_predictions(rows, "test", tmp_path)
    actual = (tmp_path / "test_results_mnli_mismatched.tsv").read_text()
    assert actual == "index\tprediction\n0\tno\n"


def test_predicted_numbers_have_three_digits(build_objective, tmp_path):
    objective, _, _ = build_objective(scored([0.5, 1.5]))
    objective.splits["test"] = SimpleNamespace(parts={})
    objective.save_predictions({"row_outputs": np.array([[1.23456]])}, "test", tmp_path)
    assert (tmp_path / "test_results.tsv").read_text() == "index\tprediction\n0\t1.235\n"


def test_how_many_examples_a_class_has_is_logged(build_objective, messages, caplog):
    with caplog.at_level(logging.INFO, logger="hfseq"):
        build_objective(pairs())
    assert "validation: 5 examples: no 3, yes 2" in messages()
    with caplog.at_level(logging.INFO, logger="hfseq"):
        build_objective(scored([0.5, 1.5]))
    assert "2 examples, numbers from 0.5 to 1.5, mean 1" in messages()


def test_untrainable_runs_are_rejected_before_training(build_objective):
    with pytest.raises(DataError, match="every training example has the label 'a'"):
        build_objective(scored(["a", "a"]))
    with pytest.raises(DataError, match="the label 'a' is not a number"):
        build_objective(scored([1.5, "a"]), task_type="regression")
    with pytest.raises(UsageError, match="--metrics nothing"):
        build_objective(pairs(), metrics=["nothing"])


def test_a_batch_has_the_shapes_the_step_needs(build_objective):
    objective, _, rows = build_objective(pairs())
    batch = batch_of(objective, rows, 4)
    assert batch["labels"].shape == (4,) and batch["labels"].dtype == np.int32
    assert {len(array) for array in batch.values()} == {4}


@pytest.mark.parametrize(
    ("values", "metric", "message"),
    [
        ([0.5, 1.5, 2.5], "accuracy", "--metrics accuracy requires classes.*pearson"),
        (["x", "y", "z"], "f1", "--metrics f1 .* there are 3.*f1_macro"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_training(
    build_objective, values, metric, message
):
    with pytest.raises(UsageError, match=message):
        build_objective(scored(values), metrics=[metric])


@pytest.mark.slow
def test_reported_metrics_are_known_beforehand(build_objective):
    names = {"loss", "accuracy", "f1", "matthews_correlation"}
    assert build_objective(pairs())[0].reported_metrics("validation") == names
    assert build_objective(scored([0.5, 1.5]))[0].reported_metrics("validation") == {
        "loss",
        "pearson",
        "spearmanr",
    }
