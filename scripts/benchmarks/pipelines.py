"""Texts of mixed lengths through ``pipeline`` and ``encode``, beside PyTorch's (a suite of run.py).

The peers are called as their documentation does: Transformers' pipeline with a batch size, with the
texts as they come and sorted by their length, and sentence-transformers' ``encode``, which sorts.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import data
import harness
import inference
import training
from harness import Case, Contestant, Options, Rows, Running, Suite


def pipelines_cases(options: Options) -> list[Case]:
    rows = options.choose(32, 128, 32, 4)
    turns = {"rounds": options.choose(3, 7, 3, 1), "warmup": 1}
    cases = []
    for job, model, more, count in (
        ("classify", "classifier", (), options.choose(200, 4000, 100, 8)),
        ("embed", "minilm", ("sentence_transformers",), options.choose(400, 4000, 100, 8)),
    ):
        # The tokenizer has as many tokens, and at least all bytes.
        size = options.size(model) | {"vocab_size": options.choose(8000, 8000, 8000, 300)}
        settings = {"job": job, "model": model, "size": size, "count": count, "rows": rows}
        title = training.subject_of(model).title
        name = f"{job}, {title}, {count} texts, float32"
        torch = Contestant(
            "PyTorch", name, "pipelines:torch_texts", settings, harness.PYTORCH + more
        )
        ours = Contestant("hfseq", name, "pipelines:hfseq_texts", settings, harness.HFSEQ)
        ordered = dataclasses.replace(
            torch, name="PyTorch, sorted", settings=settings | {"sort": True}
        )
        # sentence-transformers sorts itself
        members = (torch, ordered, ours) if job == "classify" else (torch, ours)
        cases.append(Case(name, members, count, "texts", weights=(model, size), **turns))
    return cases


def texts(count: int, words: int) -> tuple[list[str], Any]:
    """Return texts of 2 to 150 words, most of them short, and their tokenizer."""
    import numpy as np

    home, tokenizer = data.corpus(max(1.0, count / 250), words)
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(2), np.log(150), count)).astype(int)
    made = data.documents(home / "text.txt")
    shutil.rmtree(home)
    pieces = [" ".join(text.split()[:n]) for text, n in zip(made, lengths, strict=False)]
    if len(pieces) < count:
        raise RuntimeError(f"only {len(pieces)} of {count} texts were made")
    return pieces, tokenizer


def running(step: Any, given: list[str], tokenizer: Any, memory: Any, facts: Any) -> Running:
    """Return a contestant whose ``step`` gives numbers of the texts; they are compared."""
    import numpy as np

    rows = tokenizer(given, truncation=True)["input_ids"]
    facts |= {"tokens": sum(map(len, rows)), "longest": max(map(len, rows))}
    # Cubes, since shares of a text sum to 1, and squares of a normalised vector do.
    facts["mean"] = float((np.abs(np.asarray(step(), np.float64)) ** 3).mean())
    return Running(harness.working(step), memory, facts)


def hfseq_texts(
    job: str, model: str, size: dict[str, Any], count: int, rows: int, weights: str
) -> Running:
    import hfseq

    module = training.hfseq_class(model).from_pretrained(weights)
    given, tokenizer = texts(count, module.config.vocab_size)
    if job == "classify":
        made = hfseq.pipeline("text-classification", module, tokenizer, batch_size=rows)
        step = lambda: scores(made(given, top_k=None, truncation=True))  # noqa: E731
    else:
        step = lambda: module.encode(  # noqa: E731
            given, batch_size=rows, pooling="mean", normalize_embeddings=True, tokenizer=tokenizer
        )
    return running(
        step, given, tokenizer, harness.jax_peak_bytes, training.jax_facts(module.params)
    )


def torch_texts(
    job: str,
    model: str,
    size: dict[str, Any],
    count: int,
    rows: int,
    weights: str,
    sort: bool = False,
) -> Running:
    import transformers

    module, device = training.load_torch(model, weights, training.configuration(model, size))
    given, tokenizer = texts(count, module.config.vocab_size)
    if sort:
        given = sorted(given, key=len)
    if job == "classify":
        made = transformers.pipeline(
            "text-classification", module, tokenizer=tokenizer, batch_size=rows, device=device
        )
        step = lambda: scores(made(given, top_k=None, truncation=True))  # noqa: E731
    else:
        from sentence_transformers import SentenceTransformer, models

        tokenizer.save_pretrained(weights)
        parts = models.Transformer(weights), models.Pooling(module.config.hidden_size, "mean")
        encoder = SentenceTransformer(modules=[*parts, models.Normalize()], device=device)
        step = lambda: encoder.encode(given, batch_size=rows)  # noqa: E731
    return running(step, given, tokenizer, harness.torch_peak_bytes, training.torch_facts(module))


def scores(answers: Any) -> list[list[float]]:
    """Return the scores of each text in the order of their labels."""
    return [
        [one["score"] for one in sorted(answer, key=lambda one: one["label"])] for answer in answers
    ]


def pipelines_remarks(rows: Rows) -> list[str]:
    facts = next((row["facts"] for row in rows if "tokens" in row["facts"]), None)
    if facts is None:
        return []
    return [f"The texts have {facts['tokens']} tokens, the longest {facts['longest']}."]


PIPELINES = Suite(
    "Pipelines",
    "`hfseq.pipeline('text-classification')` beside Transformers' pipeline, and `model.encode` "
    "beside sentence-transformers', on made texts of 2 to 150 words in batches of 32 (128 on a "
    "GPU); tokenising counts. Random weights, which are the same on all sides, as the results are.",
    pipelines_cases,
    (harness.CASE, ("texts/s", harness.rate), harness.RATIO, harness.MEMORY),
    "ratio",
    problems=inference.inference_problems,
    remarks=pipelines_remarks,
)
