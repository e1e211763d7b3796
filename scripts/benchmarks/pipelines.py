"""A suite of run.py that measures ``hfseq.pipeline`` and ``encode`` on texts of mixed lengths.

The PyTorch libraries are called as in their documentation: Transformers' pipeline with a batch
size, on texts in random order and on texts sorted by length, and sentence-transformers' ``encode``,
which sorts the texts itself.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import data
import harness
import inference
import training
from harness import Case, Contestant, Options, Rows, Suite, Workload


def pipelines_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite: text classification and sentence embedding."""
    rows = options.choose(32, 128, 32, 4)
    timing = {"rounds": options.choose(3, 7, 3, 1), "warmup": 1}
    cases = []
    for task, model, packages, count in (
        ("classify", "classifier", (), options.choose(200, 4000, 100, 8)),
        ("embed", "minilm", ("sentence_transformers",), options.choose(400, 4000, 100, 8)),
    ):
        # The vocabulary size of the tokenizer, which contains at least all bytes.
        size = options.size(model) | {"vocab_size": options.choose(8000, 8000, 8000, 300)}
        settings = {"job": task, "model": model, "size": size, "count": count, "rows": rows}
        title = training.model_spec(model).title
        name = f"{task}, {title}, {count} texts, float32"
        torch = Contestant(
            "PyTorch", name, "pipelines:torch_texts", settings, harness.PYTORCH + packages
        )
        ours = Contestant("hfseq", name, "pipelines:hfseq_texts", settings, harness.HFSEQ)
        ordered = dataclasses.replace(
            torch, name="PyTorch, sorted", settings=settings | {"sort": True}
        )
        # sentence-transformers sorts the texts itself.
        members = (torch, ordered, ours) if task == "classify" else (torch, ours)
        cases.append(Case(name, members, count, "texts", weights=(model, size), **timing))
    return cases


def texts(count: int, words: int) -> tuple[list[str], Any]:
    """Returns texts of 2 to 150 words, most of them short, and a tokenizer for them."""
    import numpy as np

    home, tokenizer = data.make_corpus(max(1.0, count / 250), words)
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(2), np.log(150), count)).astype(int)
    documents = data.read_documents(home / "text.txt")
    shutil.rmtree(home)
    pieces = [" ".join(text.split()[:n]) for text, n in zip(documents, lengths, strict=False)]
    if len(pieces) < count:
        raise RuntimeError(f"only {len(pieces)} of {count} texts were generated")
    return pieces, tokenizer


def text_workload(
    step: Any, documents: list[str], tokenizer: Any, memory: Any, info: Any
) -> Workload:
    """Returns a workload whose ``step`` returns numbers for the texts, and records their mean."""
    import numpy as np

    rows = tokenizer(documents, truncation=True)["input_ids"]
    info |= {"tokens": sum(map(len, rows)), "longest": max(map(len, rows))}
    # Cubes: scores sum to 1, and so do the squares of a normalized embedding.
    info["mean"] = float((np.abs(np.asarray(step(), np.float64)) ** 3).mean())
    return Workload(harness.make_step(step), memory, info)


def hfseq_texts(
    job: str, model: str, size: dict[str, Any], count: int, rows: int, weights: str
) -> Workload:
    """Classifies or embeds the texts with hfseq."""
    import hfseq

    module = training.hfseq_class(model).from_pretrained(weights)
    documents, tokenizer = texts(count, module.config.vocab_size)
    if job == "classify":
        pipeline = hfseq.pipeline("text-classification", module, tokenizer, batch_size=rows)
        step = lambda: scores(pipeline(documents, top_k=None, truncation=True))  # noqa: E731
    else:
        step = lambda: module.encode(  # noqa: E731
            documents,
            batch_size=rows,
            pooling="mean",
            normalize_embeddings=True,
            tokenizer=tokenizer,
        )
    return text_workload(
        step, documents, tokenizer, harness.jax_peak_bytes, training.jax_info(module.params)
    )


def torch_texts(
    job: str,
    model: str,
    size: dict[str, Any],
    count: int,
    rows: int,
    weights: str,
    sort: bool = False,
) -> Workload:
    """Classifies the texts with Transformers, or embeds them with sentence-transformers."""
    import transformers

    module, device = training.load_torch(model, weights, training.make_config(model, size))
    documents, tokenizer = texts(count, module.config.vocab_size)
    if sort:
        documents = sorted(documents, key=len)
    if job == "classify":
        pipeline = transformers.pipeline(
            "text-classification", module, tokenizer=tokenizer, batch_size=rows, device=device
        )
        step = lambda: scores(pipeline(documents, top_k=None, truncation=True))  # noqa: E731
    else:
        from sentence_transformers import SentenceTransformer, models

        tokenizer.save_pretrained(weights)
        parts = models.Transformer(weights), models.Pooling(module.config.hidden_size, "mean")
        encoder = SentenceTransformer(modules=[*parts, models.Normalize()], device=device)
        step = lambda: encoder.encode(documents, batch_size=rows)  # noqa: E731
    return text_workload(
        step, documents, tokenizer, harness.torch_peak_bytes, training.torch_info(module)
    )


def scores(answers: Any) -> list[list[float]]:
    """Returns the scores of each text, sorted by label."""
    return [
        [entry["score"] for entry in sorted(answer, key=lambda entry: entry["label"])]
        for answer in answers
    ]


def pipelines_remarks(rows: Rows) -> list[str]:
    """Returns a sentence about the lengths of the texts."""
    info = next((row["facts"] for row in rows if "tokens" in row["facts"]), None)
    if info is None:
        return []
    return [f"The texts have {info['tokens']} tokens in total, the longest has {info['longest']}."]


PIPELINES = Suite(
    "Pipelines",
    "`hfseq.pipeline('text-classification')` compared with Transformers' pipeline, and "
    "`model.encode` compared with sentence-transformers, on generated texts of 2 to 150 words in "
    "batches of 32 (128 on a GPU). Times include tokenization. All sides use the same random "
    "weights and must return the same results.",
    pipelines_cases,
    (harness.CASE, ("texts/s", harness.rate), harness.RATIO, harness.MEMORY),
    "ratio",
    problems=inference.inference_problems,
    remarks=pipelines_remarks,
)
