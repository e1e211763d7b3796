"""A suite of run.py that compares retrieval models with sentence-transformers.

The rows encode texts, score pairs, and train embeddings with in-batch negatives. The model has the
size of MiniLM-L6. Texts are processed as in `pipelines.py`. In a training step, both libraries
compute the gradient of the same batch, which has been tokenized before the measurement, and update
the weights with AdamW.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import harness
import inference
import pipelines
import training
from harness import Case, Contestant, Options, Suite, Workload

PACKAGES = (*harness.PYTORCH, "sentence_transformers")


def retrieval_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite: encode, rerank and train."""
    rows = options.choose(32, 128, 32, 4)
    timing = {"rounds": options.choose(3, 7, 3, 1), "warmup": 1}
    length = options.choose(64, 128, 64, 16)
    vocabulary = {"vocab_size": options.choose(8000, 8000, 8000, 300)}
    cases = []
    for job, model, unit, factory in (
        ("embed", "minilm", "texts", "pipelines:{}_texts"),
        ("rank", "minilm_ranker", "pairs", "pipelines:{}_texts"),
        ("train", "minilm", "pairs", "retrieval:{}_training"),
    ):
        size = options.size(model) | vocabulary
        settings: dict[str, Any] = {"model": model, "size": size, "rows": rows}
        title = training.model_spec(model).title
        if job == "train":
            settings["length"], count = length, rows
            name = f"train, {title}, {rows} pairs of {length} tokens, float32"
        else:
            count = options.choose(400, 4000, 100, 8)
            settings |= {"job": job, "count": count}
            name = f"{job}, {title}, {count} {unit}, float32"
        members = tuple(
            Contestant(label, name, factory.format(kind), settings, packages)
            for label, kind, packages in (
                ("PyTorch", "torch", PACKAGES),
                ("hfseq", "hfseq", harness.HFSEQ),
            )
        )
        cases.append(Case(name, members, count, unit, weights=(model, size), **timing))
    return cases


def examples(rows: int, length: int, words: int) -> tuple[list[tuple[str, str]], Any]:
    """Returns pairs of texts with more words than the model reads tokens, and a tokenizer."""
    documents, tokenizer = pipelines.texts(8 * rows, words)
    stream = " ".join(documents).split()
    while len(stream) < 2 * rows * length:
        stream = stream + stream
    texts = [" ".join(stream[n * length : (n + 1) * length]) for n in range(2 * rows)]
    return list(zip(texts[::2], texts[1::2], strict=True)), tokenizer


def hfseq_training(
    model: str, size: dict[str, Any], rows: int, length: int, weights: str
) -> Workload:
    """Builds a training step with the objective of `hfseq train embedding`."""
    import jax
    import numpy as np
    import optax

    from hfseq.data.arguments import EmbeddingArguments
    from hfseq.data.batches import RowRandom
    from hfseq.objectives.embedding import Embedding

    config = training.make_config(model, size, 0.0)
    module = training.hfseq_class(model).from_pretrained(weights, config=config)
    pairs, tokenizer = examples(rows, length, config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.jsonl")
        names = ("anchor", "positive")
        lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in pairs]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = EmbeddingArguments(
            train_file=[str(path)], validation_split_percentage=0, max_seq_length=length
        )
        objective = Embedding(arguments, tokenizer, config)
        objective.prepare(module)
        data, _ = objective.make_rows(objective.load_splits(None), "train", length)
    fetched = data.fetch(np.arange(rows)) | {"valid": np.ones(rows, bool)}
    batch = objective.collate(fetched, RowRandom(0, 0, np.arange(rows)), 1)
    optimizer = optax.adamw(2e-5)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            total, count, _ = objective.loss(module, params, batch, None, False)
            return total / count

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    program: Any = jax.jit(step, donate_argnums=(0, 1))
    current: list[Any] = [module.params, optimizer.init(module.params)]
    batch = jax.device_put(batch)

    def run() -> float:
        *current[:], value = program(*current, batch)
        return float(value)

    info = training.jax_info(module.params) | {"mean": run()}
    return Workload(harness.make_step(run), harness.jax_peak_bytes, info)


def torch_training(
    model: str, size: dict[str, Any], rows: int, length: int, weights: str
) -> Workload:
    """Builds a training step with the loss of sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling

    config = training.make_config(model, size, 0.0)
    module, device = training.load_torch(model, weights, config)
    pairs, tokenizer = examples(rows, length, config.vocab_size)
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(weights)
    dropout = {name: 0.0 for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
    transformer = Transformer(weights, config_kwargs=dropout)
    parts = transformer, Pooling(config.hidden_size, "mean"), Normalize()
    encoder = SentenceTransformer(modules=list(parts), device=device)
    loss = losses.MultipleNegativesRankingLoss(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), 2e-5, weight_decay=1e-4)
    features = [
        {
            name: tensor.to(device)
            for name, tensor in encoder.preprocess(list(column)).items()
            if isinstance(tensor, torch.Tensor)
        }
        for column in zip(*pairs, strict=True)
    ]
    encoder.train()

    def run() -> float:
        value = loss([dict(column) for column in features], None)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        return float(value.detach())

    info = training.torch_info(module) | {"mean": run()}
    return Workload(harness.make_step(run), harness.torch_peak_bytes, info)


RETRIEVAL = Suite(
    "Retrieval models",
    "`model.encode`, `CrossEncoder.predict` and a training step of `hfseq train embedding` are "
    "compared with sentence-transformers, for a model of the size of MiniLM-L6. Encoding and "
    "reranking include the tokenizer; their texts have 2 to 150 words. A training step computes "
    "the loss of in-batch negatives, its gradient and the update of AdamW, without dropout. Both "
    "libraries use the same random weights and must return the same results.",
    retrieval_cases,
    (harness.CASE, ("items/s", harness.rate), harness.RATIO, harness.MEMORY),
    "ratio",
    problems=inference.inference_problems,
    remarks=pipelines.pipelines_remarks,
)
