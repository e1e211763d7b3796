"""Classification runs from files to a directory that PyTorch loads."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from hfseq.errors import DataError, UsageError
from tests.training.conftest import TINY, TWO_LAYERS, assert_same, check_resume, losses, make_runner

GOOD, BAD = "the cat sat here and slept".split(), "no dog barked there or ran".split()
SIDES = "encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4"
BART = f"d_model=32,max_position_embeddings=64,{SIDES},encoder_ffn_dim=64,decoder_ffn_dim=64"
VQ = "hidden_size=32,num_hidden_layers=1,head_dim=8,num_codes=8,window_size=4,block_size=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two kinds of sentences as CoLA files, as pairs and with numbers, and a tokenizer."""
    from hfseq.data.tokenizers import train_tokenizer

    path, draw = tmp_path_factory.mktemp("labelled"), random.Random(0)

    def sentence():
        is_good = draw.random() < 0.6
        return int(is_good), " ".join(draw.choices(GOOD if is_good else BAD, k=draw.randint(2, 14)))

    texts = []
    for name, count in (("train", 100), ("in_dev", 17), ("out_dev", 12)):
        rows = [sentence() for _ in range(count)]
        texts += [text for _, text in rows]
        lines = [f"src\t{label}\t{'' if label else '*'}\t{text}" for label, text in rows]
        (path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        pairs = [
            {
                "sentence1": text,
                "sentence2": texts[i],
                "label": "good" if label else "bad",
                "score": label * 2.5 + 0.25,
            }
            for i, (label, text) in enumerate(rows)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    for family in ("bert", "roberta", "bart", "vq_transformer"):
        train_tokenizer(texts, family, vocab_size=300, output_dir=path / family, min_frequency=1)
    return path


@pytest.fixture
def classify(folder, tmp_path):
    return make_runner(
        "classification",
        tmp_path,
        model_type="bert",
        config_overrides=TWO_LAYERS,
        tokenizer_name=folder / "bert",
        train_file=folder / "train.tsv",
        validation_file=f"{folder}/in_dev.tsv,{folder}/out_dev.tsv",
        max_seq_length=32,
        global_batch_size=16,
        learning_rate=3e-3,
        max_steps=6,
    )


def pairs(folder, **extra_columns):
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "in_dev.jsonl"}
    return (
        files | {"sentence1_column": "sentence1", "sentence2_column": "sentence2"} | extra_columns
    )


def test_run_learns_and_output_loads_in_jax_and_pytorch(classify, folder):
    loop = classify(
        config_overrides=TINY,
        max_steps=80,
        eval_steps=40,
        save_steps=40,
        logging_steps=10,
        metric_for_best_model="eval_matthews_correlation",
        load_best_model_at_end=True,
    )
    train_losses = losses(loop.folder)
    assert train_losses[80] < 0.2 < train_losses[1] and loop.metrics["train_accuracy"] > 0.9
    eval_metrics = {name: value for name, value in loop.metrics.items() if name.startswith("eval_")}
    for part in ("", "in_dev_", "out_dev_"):
        assert eval_metrics[f"eval_{part}matthews_correlation"] == 1.0
        assert (
            eval_metrics[f"eval_{part}accuracy"] == 1.0 and eval_metrics[f"eval_{part}loss"] < 0.4
        )
    mean = (17 * eval_metrics["eval_in_dev_loss"] + 12 * eval_metrics["eval_out_dev_loss"]) / 29
    assert eval_metrics["eval_loss"] == pytest.approx(mean, rel=1e-5)
    assert loop.progress.best_metric == 1.0
    results = json.loads((loop.folder / "eval_results.json").read_text())
    assert results["eval_matthews_correlation"] == 1.0
    card = (loop.folder / "README.md").read_text()
    assert "matthews_correlation" in card and "text-classification" in card
    logged = [
        json.loads(line)
        for line in (loop.folder / "metrics.jsonl").read_text().split("\n")
        if "eval_matthews_correlation" in line
    ]
    assert len(logged) >= 2
    pytest.importorskip("torch")
    from transformers import pipeline

    classifier = pipeline("text-classification", str(loop.folder))
    assert classifier("the cat sat")[0]["label"] == "acceptable"
    assert classifier("no dog ran")[0]["label"] == "unacceptable"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "roberta", "tokenizer_name": "roberta"},
        {"model_type": "bart", "tokenizer_name": "bart", "config_overrides": BART},
        {
            "model_type": "vq_transformer",
            "tokenizer_name": "vq_transformer",
            "config_overrides": VQ,
        },
        {"model_type": "fp8_encoder"},
    ],
    ids=lambda changes: changes["model_type"],
)
def test_every_encoder_with_the_head_learns(classify, folder, changes):
    if "tokenizer_name" in changes:
        changes = changes | {"tokenizer_name": folder / changes["tokenizer_name"]}
    loop = classify(max_steps=25, **changes)
    # Six of ten examples are good: a constant prediction has a loss of 0.673 and 60 % accuracy.
    assert loop.metrics["eval_loss"] < 0.62 and loop.metrics["eval_accuracy"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "data=4",
        "data=2,tensor=2",
        "fsdp=2,tensor=2,sequence=2",
    ],
)
def test_losses_and_scores_do_not_depend_on_devices_or_micro_batches(classify, mesh):
    single = classify("one", do_train=True, do_eval=True)
    devices = int(np.prod([int(part[-1]) for part in mesh.split(",")]))
    distributed = classify(
        "many",
        devices,
        mesh=mesh,
        gradient_accumulation_steps=2,
        do_train=True,
        do_eval=True,
        per_device_eval_batch_size=3,
    )
    assert_same(losses(distributed.folder), losses(single.folder))
    for name, value in single.metrics.items():
        if name.startswith("eval_") and not name.endswith("runtime"):
            assert distributed.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(classify):
    options = {"tokenizer_name": None, "vocabulary": "words", "do_train": True, "save_steps": 2}
    uninterrupted, resumed = check_resume(classify, **options)
    assert resumed.run.tokenizer.get_vocab() == uninterrupted.run.tokenizer.get_vocab()
    assert resumed.run.model.config.vocab_size == len(resumed.run.tokenizer)


@pytest.mark.slow
def test_pairs_are_classified_and_predictions_written(classify, folder):
    loop = classify(
        **pairs(folder, test_file=folder / "out_dev.jsonl"),
        label_column="label",
        do_train=True,
        do_eval=True,
        do_predict=True,
        max_steps=12,
        learning_rate=1e-3,
    )
    assert loop.run.objective.uses_token_types and loop.run.model.config.label2id == {
        "bad": 0,
        "good": 1,
    }
    lines = (loop.folder / "test_results.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 13
    assert {line.split("\t")[1] for line in lines[1:]} <= {"good", "bad"}
    assert {"predict_accuracy", "predict_f1", "eval_f1", "eval_matthews_correlation"} <= set(
        loop.metrics
    )


@pytest.mark.slow
def test_numbers_are_learnt_and_correlate(classify, folder):
    loop = classify(
        **pairs(folder, sentence2_column=None),
        label_column="score",
        max_steps=60,
        learning_rate=1e-2,
        metric_for_best_model="spearmanr",
    )
    assert (
        loop.run.model.config.problem_type == "regression" and loop.run.model.config.num_labels == 1
    )
    assert loop.metrics["eval_pearson"] > 0.8 and loop.metrics["eval_loss"] < 1
    assert "train_accuracy" not in loop.metrics
    assert loop.progress.best_metric == pytest.approx(loop.metrics["eval_spearmanr"])
    assert "| loss | " in (card := (loop.folder / "README.md").read_text())
    assert f"{folder.name}/in_dev.jsonl | validation |" in card


@pytest.mark.slow
def test_a_score_that_is_not_a_number_is_null_in_the_results(classify, folder, tmp_path):
    file = tmp_path / "constant.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"the cat {i}", "label": 2.5}) + "\n" for i in range(3))
    )
    loop = classify(
        **pairs(folder, sentence2_column=None)
        | {
            "train_file": file,
            "validation_file": file,
            "sentence1_column": "text",
            "max_steps": 1,
        }
    )
    results_text = (loop.folder / "eval_results.json").read_text()
    assert json.loads(results_text, parse_constant=pytest.fail)["eval_pearson"] is None


def test_evaluation_uses_classes_and_vocabulary_of_the_model(classify, folder, tmp_path):
    """Training visits every example once, and examples without labels are predicted."""
    epoch = {"max_steps": None, "num_train_epochs": 1}
    words = {"tokenizer_name": None, "vocabulary": "words", "config_overrides": TINY}
    trained = classify("one", **epoch, **words)
    assert trained.progress.step == 7  # 100 examples, 16 a step: the last batch has four
    assert trained.progress.tokens_seen == trained.run.data.train.rows.total_tokens
    unlabelled = tmp_path / "unlabelled.jsonl"
    unlabelled.write_text("".join(json.dumps({"text": f"the cat {i}"}) + "\n" for i in range(5)))
    again = classify(
        "again",
        train_file=None,
        model_type=None,
        config_overrides=None,
        tokenizer_name=None,
        model_name_or_path=trained.folder,
        test_file=unlabelled,
        do_eval=True,
        do_predict=True,
    )
    assert len((again.folder / "test_results.tsv").read_text().splitlines()) == 6
    assert {name for name in again.metrics if name.startswith("predict_")} == {"predict_runtime"}
    for name in ("eval_loss", "eval_matthews_correlation", "eval_in_dev_accuracy"):
        assert again.metrics[name] == pytest.approx(trained.metrics[name], rel=1e-5)


@pytest.mark.slow
def test_a_model_of_other_classes_needs_a_new_classifier(classify, folder, tmp_path):
    three = tmp_path / "three.jsonl"
    three.write_text(
        "".join(json.dumps({"text": f"t {i}", "label": i % 3}) + "\n" for i in range(30))
    )
    trained = classify("one", do_train=True)
    changes = {
        "model_type": None,
        "config_overrides": None,
        "model_name_or_path": trained.folder,
        "train_file": three,
        "validation_file": None,
        "do_train": True,
        "max_steps": 2,
    }
    with pytest.raises(Exception, match="ignore_mismatched_sizes"):
        classify("other", **changes)
    loop = classify("new", ignore_mismatched_sizes=True, **changes)
    assert loop.run.model.config.id2label == {0: "0", 1: "1", 2: "2"}


@pytest.mark.slow
def test_batches_of_other_widths_compile_four_times_at_most(classify):
    loop = classify(max_steps=14, per_device_eval_batch_size=1)
    widths = loop.run.data.train.rows.widths
    assert 1 < len(widths) <= 4 and widths[-1] <= 32
    assert loop.run.eval_step._cache_size() <= 4


@pytest.mark.parametrize(
    ("changes", "error_type", "message"),
    [
        (
            {"train_file": "in_dev.jsonl", "label_column": "nobody"},
            DataError,
            "--label_column nobody",
        ),
        (
            {"model_type": "gpt2", "config_overrides": None, "tokenizer_name": "roberta"},
            UsageError,
            "'gpt2' has no class ForSequenceClassification",
        ),
        ({"task_name": "rte"}, UsageError, "no column 'label'.*--label_column NAME"),
        (
            {"metric_for_best_model": "f1"},
            UsageError,
            "metric_for_best_model f1: .*eval_accuracy, eval_in_dev_accuracy",
        ),
        ({"max_seq_length": 500}, UsageError, "--max_seq_length 500 exceeds the .* positions"),
        ({"do_train": True, "do_predict": True}, UsageError, "no test split: .*--test_file"),
        ({"tokenizer_name": None}, UsageError, "no tokenizer: .*--tokenizer_name"),
    ],
)
def test_impossible_runs_are_rejected(classify, folder, changes, error_type, message):
    for name in ("train_file", "tokenizer_name"):
        if changes.get(name):
            changes = changes | {name: folder / changes[name]}
    with pytest.raises(error_type, match=message):
        classify(**changes)


@pytest.mark.slow
def test_a_classifier_learns_from_a_teacher_with_the_same_classes(classify):
    teacher = classify("teacher", max_steps=5).folder
    student = classify("student", max_steps=5, teacher=teacher, hidden_state_weight=1.0)
    assert student.metrics["eval_distillation_loss"] >= 0
    assert 0 <= student.metrics["eval_hidden_state_distance"] <= 2
