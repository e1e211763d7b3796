"""Runs that train text embeddings."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import hfseq
from hfseq.errors import DataError, UsageError
from tests.training.conftest import WORDS, check_resume, losses

BERT = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "max_position_embeddings=40"
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Words and the same words in another order. A negative lacks some of them."""
    folder, draw, words = tmp_path_factory.mktemp("pairs"), random.Random(0), sorted(set(WORDS))
    for name, count in (("train", 128), ("valid", 24)):
        rows = []
        for _ in range(count):
            sampled_words = draw.sample(words, 4)
            rows.append(
                {
                    "anchor": " ".join(sampled_words),
                    "positive": " ".join(sorted(sampled_words)),
                    "negative": " ".join(draw.sample(words, 4)),
                    "other": 1,
                }
            )
        if name == "train":
            rows += [{"anchor": "a", "positive": " ", "negative": "b"}, {"anchor": 1}]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def embed(flags, pairs, corpus):
    """Trains embeddings on the pairs."""

    def run(output, devices=1, callbacks=(), **changes):
        from tests.support import runs

        values = {
            "model_type": "bert",
            "config_overrides": BERT,
            "global_batch_size": 16,
            "per_device_eval_batch_size": 8,
            "max_seq_length": None,
            "warmup_steps": 0,
            "pad_to_max_length": True,
            "train_file": pairs / "train.jsonl",
            "validation_file": pairs / "valid.jsonl",
        } | changes
        return runs.train(flags(output, **values), "embedding", devices, callbacks)

    return run


def test_a_toy_model_retrieves_and_opens_as_it_was_trained(embed, pairs, caplog, tmp_path):
    loop = embed(
        "run",
        do_train=True,
        do_eval=True,
        max_steps=60,
        learning_rate=1e-2,
        matryoshka_dims="32,8",
    )
    log_text = caplog.text
    assert "2 of 130 train examples" in log_text
    assert "train.jsonl, line 129: 'positive' must be a non-empty text, not ' '" in log_text
    assert "line 130: 'anchor' must be a non-empty text, not 1" in log_text
    assert loop.metrics["eval_accuracy_at_1"] > 0.8 < loop.metrics["eval_mrr_at_10"]
    model = hfseq.FlaxAutoModel.from_pretrained(tmp_path / "run")
    rows = [json.loads(line) for line in (pairs / "valid.jsonl").read_text().splitlines()]
    anchors, positives = (model.encode([r[k] for r in rows]) for k in ("anchor", "positive"))
    ranked = ((anchors @ positives.T).argmax(1) == np.arange(len(rows))).mean()
    assert ranked == pytest.approx(loop.metrics["eval_accuracy_at_1"])
    np.testing.assert_allclose(np.linalg.norm(anchors, axis=1), 1, rtol=1e-5)
    short = model.encode([row["anchor"] for row in rows], truncate_dim=8)
    assert short.shape == (24, 8)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card and "model.encode(" in card
    with pytest.raises(DataError, match="line 129: 'positive' must"):
        embed("strict", bad_examples="error")


def test_the_loss_is_that_of_the_formula(embed, pairs, tmp_path):
    loop = embed(
        "run",
        do_train=True,
        do_eval=True,
        max_steps=1,
        learning_rate=0.0,
        matryoshka_dims="32,8",
        per_device_eval_batch_size=24,
    )
    model = hfseq.FlaxAutoModel.from_pretrained(tmp_path / "run")
    rows = [json.loads(line) for line in (pairs / "valid.jsonl").read_text().splitlines()]
    # trained vectors are not normalized
    model.sentence_config = hfseq.modeling.sentence.SentenceConfig()
    sides = [
        model.encode([row[name] for row in rows]).astype(np.float64)
        for name in ("anchor", "positive", "negative")
    ]
    total = 0.0
    for dim in (32, 8):
        units = [
            side[:, :dim] / np.linalg.norm(side[:, :dim], axis=1, keepdims=True) for side in sides
        ]
        scores = 20 * units[0] @ np.concatenate(units[1:]).T
        right = scores[np.arange(24), np.arange(24)]
        total += float(np.mean(np.log(np.exp(scores).sum(1)) - right))
    assert loop.metrics["eval_loss"] == pytest.approx(total, rel=1e-4)


@pytest.mark.slow
def test_eight_devices_contrast_the_global_batch(embed):
    changes = {"do_train": True, "max_steps": 4}
    single = losses(embed("one", **changes).folder)
    distributed = losses(embed("many", devices=8, mesh="data=8", **changes).folder)
    for step, value in single.items():
        assert distributed[step] == pytest.approx(value, rel=2e-5), step


@pytest.mark.slow
def test_resume_is_bit_exact(embed):
    check_resume(embed, step=4, do_train=True, save_steps=2)


def test_invalid_flags_are_rejected(embed, pairs, tmp_path):
    with pytest.raises(UsageError, match="--matryoshka_dims 64 .*32"):
        embed("wide", matryoshka_dims="64")
    with pytest.raises(UsageError, match="matryoshka_dims 8,x: expected positive integers"):
        embed("odd", matryoshka_dims="8,x")
    single = tmp_path / "one.jsonl"
    single.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UsageError, match="has the columns text.*anchor"):
        embed("one", train_file=single, validation_file=single)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cosine", "mse", "margin_mse", "forward_kl"])
def test_embeddings_learn_from_a_teacher(embed, loss):
    teacher = embed("teacher", max_steps=20, learning_rate=3e-3).folder
    options = {"teacher": teacher, "distillation_loss": loss, "task_weight": 0, "seed": 7}
    first, last = (
        embed(f"student-{steps}", max_steps=steps, learning_rate=3e-3, **options).metrics
        for steps in (1, 30)
    )
    assert last["eval_distillation_loss"] < 0.8 * first["eval_distillation_loss"]
    assert {"eval_mrr_at_10", "eval_accuracy"} <= last.keys()
