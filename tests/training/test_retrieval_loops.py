"""Runs that train cross-encoders, sparse encoders and multi-vector encoders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfseq.errors import DataError, UsageError
from tests.training.conftest import WORDS, check_resume, losses

BERT = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "max_position_embeddings=40"
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of texts and of words of these texts, in the formats of the losses."""
    folder, draw = tmp_path_factory.mktemp("retrieval"), random.Random(0)
    words = sorted(set(WORDS))
    for name, count in (("train", 64), ("valid", 16)):
        files: dict[str, list[dict[str, Any]]] = {}
        for number in range(count):
            text = draw.sample(words, 4)
            negative = " ".join(draw.sample(words, 4))
            query, document = " ".join(text[:2]), " ".join(sorted(text))
            label = number % 2
            rows = {
                "triplets": {"query": query, "document": document, "negative": negative},
                "pairs": {"query": query, "document": document},
                "labeled": {
                    "query": query,
                    "document": document if label else negative,
                    "label": label,
                },
                "lists": {
                    "query": query,
                    "documents": [document, negative][: 1 + label],
                    "labels": [1, 0][: 1 + label],
                },
                "classes": {
                    "query": query, "document": document, "label": ["no", "yes", "maybe"][number % 3]
                },
                "margins": {
                    "query": query, "document": document, "negative": negative, "score": [2.5, 1.0]
                },
                "scores": {"a": query, "b": document, "score": number / count},
                "texts": {"text": document, "label": number % 4},
            }  # fmt: skip
            for kind, row in rows.items():
                files.setdefault(kind, []).append(row)
        for kind, listed in files.items():
            write(folder / f"{name}-{kind}.jsonl", listed)
    return folder


@pytest.fixture
def fit(flags, data):
    """Trains an objective on one of the files."""

    def run(output, objective="cross_encoder", kind="pairs", devices=1, callbacks=(), **changes):
        from tests.support import runs

        values = {
            "model_type": "bert",
            "config_overrides": BERT,
            "global_batch_size": 16,
            "per_device_eval_batch_size": 8,
            "max_seq_length": None,
            "warmup_steps": 0,
            "max_steps": 4,
            "train_file": data / f"train-{kind}.jsonl",
            "validation_file": data / f"valid-{kind}.jsonl",
        } | changes
        return runs.train(flags(output, **values), objective, devices, callbacks)

    return run


CROSS_ENCODER_LOSSES = {
    "binary_cross_entropy": "labeled",
    "cross_entropy": "classes",
    "mse": "scores",
    "margin_mse": "margins",
    "multiple_negatives_ranking": "triplets",
    "lambda_loss": "lists",
    "list_net": "lists",
    "list_mle": "lists",
    "p_list_mle": "lists",
    "rank_net": "lists",
    "adr_mse": "lists",
}


@pytest.mark.parametrize(
    "loss",
    [
        loss if loss in ("lambda_loss",) else pytest.param(loss, marks=pytest.mark.slow)
        for loss in CROSS_ENCODER_LOSSES
    ],
)
def test_cross_encoders_learn_with_each_loss(fit, loss, tmp_path):
    loop = fit(
        "run",
        kind=CROSS_ENCODER_LOSSES[loss],
        loss=loss,
        do_train=True,
        do_eval=True,
        max_steps=12,
    )
    values = losses(loop.folder)
    assert np.isfinite(list(values.values())).all()
    assert min(list(values.values())[6:]) < values[1]
    assert np.isfinite(loop.metrics["eval_loss"])


OBJECTIVES = {
    "sparse_encoder": "triplets",
    "multi_vector": "triplets",
    "cross_encoder": "triplets",
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_runs_resume_exactly(fit, objective):
    changes = {"batch_sampler": "no_duplicates"}
    if objective == "cross_encoder":
        changes["loss"] = "multiple_negatives_ranking"
    check_resume(
        lambda output, **options: fit(output, objective, OBJECTIVES[objective], **options),
        step=3,
        do_train=True,
        save_steps=2,
        **changes,
    )
