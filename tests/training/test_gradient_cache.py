"""Batches that are encoded in chunks have the gradient of one large batch, in constant memory."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer, BertConfig

from hfseq import FlaxAutoModel, FlaxAutoModelForMaskedLM, FlaxAutoModelForSequenceClassification
from hfseq.data.arguments import (
    CrossEncoderArguments,
    EmbeddingArguments,
    MultiVectorArguments,
    SparseArguments,
)
from hfseq.data.batches import RowRandom
from hfseq.nn import sharding
from hfseq.nn.random import batch_keys
from hfseq.objectives.cross_encoder import CrossEncoderTraining
from hfseq.objectives.embedding import Embedding
from hfseq.objectives.multi_vector import MultiVector
from hfseq.objectives.sparse_encoder import SparseTraining

ROWS = 16
KINDS: dict[str, Any] = {
    "embedding": (Embedding, EmbeddingArguments, FlaxAutoModel),
    "cross_encoder": (
        CrossEncoderTraining,
        CrossEncoderArguments,
        FlaxAutoModelForSequenceClassification,
    ),
    "sparse_encoder": (SparseTraining, SparseArguments, FlaxAutoModelForMaskedLM),
    "multi_vector": (MultiVector, MultiVectorArguments, FlaxAutoModel),
}


def make_objective(
    model_kind: str, corpus: Any, tmp_path: Any, rows: int = ROWS, layers: int = 1, **options: Any
) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Returns an objective, its model, and a batch whose last row is invalid."""
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    examples = []
    for number in range(rows):
        words = texts[number % len(texts)].split()
        examples.append(
            {
                "anchor": f"{number} {' '.join(words[:3])}",
                "positive": f"{number} {' '.join(words[2:9])}",
                "negative": f"{number} {' '.join(words[1:6])}",
            }
        )
    path = tmp_path / f"rows-{rows}.jsonl"
    path.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    objective_class, arguments_class, auto_class = KINDS[model_kind]
    if model_kind == "cross_encoder":
        options["loss"] = "multiple_negatives_ranking"
    model_options = {
        name: options.pop(name) for name in ("dtype", "peft_config") if name in options
    }
    arguments = arguments_class(
        train_file=[str(path)], validation_split_percentage=0, pad_to_max_length=True, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=layers, num_labels=1,
        num_attention_heads=4, intermediate_size=64, max_position_embeddings=40,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = auto_class.from_config(config, **model_options)
    objective = objective_class(arguments, tokenizer, config)
    objective.prepare(model)
    data, _ = objective.make_rows(objective.load_splits(None), "train", 40)
    fetched = objective.make_batches(data, rows, seed=0)[0]
    fetched["valid"][-1] = False
    batch = objective.collate(fetched, RowRandom(0, 0, np.arange(rows)), 1)
    return objective, model, batch


def gradient(
    objective: Any, model: Any, batch: dict[str, Any], mesh: Any = None, chunk: int | None = None
) -> tuple[float, Any]:
    """Returns the loss and the gradient of a training step, with dropout."""
    objective.arguments.mini_batch_size = chunk
    rows = jnp.arange(len(batch["valid"]))

    def loss(params: Any, batch: Any, rows: Any) -> Any:
        keys = batch_keys(jax.random.key(1), rows)
        total, count, _ = objective.loss(model, params, batch, keys, True)
        return total / count

    model.use_mesh(mesh)
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    if mesh is not None:
        shardings = {
            name: sharding.batch_sharding(mesh, array.ndim + 1) for name, array in arrays.items()
        }
        arrays = {
            name: jax.device_put(array[None], shardings[name])[0] for name, array in arrays.items()
        }
    value, grads = jax.jit(jax.value_and_grad(loss))(model.params, arrays, rows)
    return float(value), grads


def assert_equal(first: Any, second: Any, relative: float = 1e-5) -> None:
    (value, grads), (other_value, other_grads) = first, second
    assert other_value == pytest.approx(value, rel=relative)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    for leaf, other in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(other, leaf, atol=relative * largest)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model_kind", "chunks", "devices"),
    [
        ("embedding", (7,), (4,)),
        pytest.param("embedding", (1, 7, ROWS), (1, 4), marks=SLOW),
        pytest.param("cross_encoder", (1, 7), (1, 4), marks=SLOW),
        pytest.param("sparse_encoder", (1, 7), (1, 4), marks=SLOW),
        pytest.param("multi_vector", (1, 7), (1, 4), marks=SLOW),
    ],
)
def test_chunks_have_the_gradient_of_the_whole_batch(model_kind, chunks, devices, corpus, tmp_path):
    objective, model, batch = make_objective(model_kind, corpus, tmp_path)
    reference = gradient(objective, model, batch)
    for count in devices:
        mesh = None
        if count > 1:
            mesh = sharding.make_mesh(f"data={count}", jax.devices()[:count])
        for chunk in chunks:
            # A device has four rows on the mesh, so 3 does not divide them.
            chunk = chunk if mesh is None else min(chunk, 3)
            assert_equal(reference, gradient(objective, model, batch, mesh, chunk))
    # Dropout is on: another key changes the loss.
    loss = jax.jit(lambda params, batch: objective.loss(model, params, batch, None, False)[0])
    without = loss(model.params, batch)
    assert float(without) / (ROWS - 1) != pytest.approx(reference[0], rel=1e-4)


def temporary_bytes(
    rows: int, chunk: int | None, corpus: Any, tmp_path: Any, model_kind: str = "embedding"
) -> int:
    """Returns the size of the temporary arrays of a training step."""
    objective, model, batch = make_objective(model_kind, corpus, tmp_path, rows, layers=2)
    objective.arguments.mini_batch_size = chunk
    numbers = jnp.arange(rows)

    def loss(params: Any, batch: Any) -> Any:
        keys = batch_keys(jax.random.key(1), numbers)
        return objective.loss(model, params, batch, keys, True)[0]

    step = jax.jit(jax.grad(loss)).lower(model.params, batch).compile()
    return step.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_batch(corpus, tmp_path):
    chunks, whole = (temporary_bytes(256, chunk, corpus, tmp_path) for chunk in (8, None))
    assert whole > 5 * chunks


@pytest.mark.slow
def test_memory_grows_with_the_chunk(corpus, tmp_path):
    assert temporary_bytes(256, 8, corpus, tmp_path) < 1.5 * temporary_bytes(
        32, 8, corpus, tmp_path
    )
    sizes = [temporary_bytes(256, chunk, corpus, tmp_path) for chunk in (8, 32, 128)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] < 2 * sizes[0] * 16


@pytest.mark.slow
def test_no_array_of_all_logits_is_stored(corpus, tmp_path):
    objective, model, batch = make_objective("sparse_encoder", corpus, tmp_path)
    rows, texts, width = batch["input_ids"].shape
    vocabulary = model.config.vocab_size

    def loss(params: Any, batch: Any) -> Any:
        keys = batch_keys(jax.random.key(1), jnp.arange(rows))
        return objective.loss(model, params, batch, keys, True)[0]

    text = jax.jit(jax.grad(loss)).lower(model.params, batch).compile().as_text()
    assert f"[{rows * (texts + 1)},{vocabulary}]" in text
    for count in (rows, rows * texts, rows * (texts + 1)):
        assert f"[{count},{width},{vocabulary}]" not in text
        assert f"[{count * width},{vocabulary}]" not in text
