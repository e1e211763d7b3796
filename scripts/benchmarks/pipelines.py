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
        ("rank", "minilm_ranker", ("sentence_transformers",), options.choose(400, 4000, 100, 8)),
    ):
        # The vocabulary size of the tokenizer, which contains at least all bytes.
        size = options.size(model) | {"vocab_size": options.choose(8000, 8000, 8000, 300)}
        settings = {"job": task, "model": model, "size": size, "count": count, "rows": rows}
        title = training.model_spec(model).title
        unit = "pairs" if task == "rank" else "texts"
        name = f"{task}, {title}, {count} {unit}, float32"
        torch = Contestant(
            "PyTorch", name, "pipelines:torch_texts", settings, harness.PYTORCH + packages
        )
        ours = Contestant("hfseq", name, "pipelines:hfseq_texts", settings, harness.HFSEQ)
        ordered = dataclasses.replace(
            torch, name="PyTorch, sorted", settings=settings | {"sort": True}
        )
        # sentence-transformers sorts the texts itself.
        members = (torch, ordered, ours) if task == "classify" else (torch, ours)
        cases.append(Case(name, members, count, unit, weights=(model, size), **timing))
    for job, model, unit, count in (
        ("generate", "gpt2", "texts", options.choose(32, 256, 8, 2)),
        ("image", "image_classifier", "images", options.choose(64, 1024, 16, 2)),
        ("speech", "whisper", "files", options.choose(8, 64, 2, 2)),
    ):
        size = options.size(model)
        if job != "generate":  # images have no vocabulary, and Whisper's has 1,500 timestamps
            size = {key: value for key, value in size.items() if key != "vocab_size"}
        settings = {"job": job, "model": model, "size": size, "count": count, "rows": min(rows, 8)}
        title = training.model_spec(model).title
        name = f"{job}, {title}, {count} {unit}, float32"
        members = (
            Contestant("PyTorch", name, "pipelines:torch_media", settings, harness.PYTORCH),
            Contestant("hfseq", name, "pipelines:hfseq_media", settings, harness.HFSEQ),
        )
        cases.append(Case(name, members, count, unit, weights=(model, size), **timing))
    return cases


#: Tokens that each prompt is continued by.
NEW_TOKENS = 32


def media_inputs(
    job: str, count: int, config: Any, generation_config: Any
) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Returns the task, the inputs, the processors and the options of the call."""
    import numpy as np
    import transformers

    random = np.random.default_rng(0)
    if job == "image":
        from PIL import Image

        inputs = [
            Image.fromarray(random.integers(0, 256, (320, 400, 3), np.uint8)) for _ in range(count)
        ]
        size = {"height": config.image_size, "width": config.image_size}
        processor = transformers.ViTImageProcessorPil(size=size)
        return "image-classification", inputs, {"image_processor": processor}, {"top_k": 5}
    if job == "speech":
        inputs = [random.normal(size=16000 * 5).astype(np.float32) * 0.1 for _ in range(count)]
        vocabulary = {f"t{number}": number for number in range(config.vocab_size - 1504)}
        vocabulary |= {"<|startoftranscript|>": len(vocabulary), "</s>": len(vocabulary) + 1}
        vocabulary |= {"<|notimestamps|>": len(vocabulary)}
        tokenizer = transformers.WhisperTokenizer(
            vocab=vocabulary, merges=[], unk_token="t0", eos_token="</s>", pad_token="</s>"
        )
        generation_config.no_timestamps_token_id = vocabulary["<|notimestamps|>"]
        processors = {
            "tokenizer": tokenizer,
            "feature_extractor": transformers.WhisperFeatureExtractor(),
        }
        options = {"generate_kwargs": {"max_new_tokens": NEW_TOKENS, "num_beams": 1}}
        return "automatic-speech-recognition", inputs, processors, options
    documents, tokenizer = texts(count, config.vocab_size)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = [" ".join(text.split()[:40]) for text in documents]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return "text-generation", inputs, {"tokenizer": tokenizer}, options


def media_workload(step: Any, memory: Any, info: Any) -> Workload:
    """Returns a workload that also records a checksum of the results, to compare contestants."""
    import zlib

    answers = [answer[0] if isinstance(answer, list) else answer for answer in step()]
    results = [
        str(answer.get("label", answer.get("generated_text", answer.get("text"))))
        for answer in answers
    ]
    info |= {"mean": zlib.crc32("|".join(results).encode()) / 1e9}
    return Workload(harness.make_step(step), memory, info)


def hfseq_media(
    job: str, model: str, size: dict[str, Any], count: int, rows: int, weights: str
) -> Workload:
    """Runs a pipeline of hfseq on prompts, images or audio."""
    import hfseq

    module = training.hfseq_class(model).from_pretrained(weights)
    task, inputs, processors, options = media_inputs(
        job, count, module.config, module.generation_config
    )
    pipeline = hfseq.pipeline(task, module, batch_size=rows, **processors)
    return media_workload(
        lambda: pipeline(inputs, **options),
        harness.jax_peak_bytes,
        training.jax_info(module.params),
    )


def torch_media(
    job: str, model: str, size: dict[str, Any], count: int, rows: int, weights: str
) -> Workload:
    """Runs a pipeline of Transformers on prompts, images or audio."""
    import transformers

    module, device = training.load_torch(model, weights, training.make_config(model, size))
    task, inputs, processors, options = media_inputs(
        job, count, module.config, getattr(module, "generation_config", None)
    )
    if job == "generate":
        processors["tokenizer"].padding_side = "left"
    pipeline = transformers.pipeline(task, module, batch_size=rows, device=device, **processors)
    return media_workload(
        lambda: pipeline(list(inputs), **options),
        harness.torch_peak_bytes,
        training.torch_info(module),
    )


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
    """Returns a workload that processes the texts and records the mean of the results."""
    import numpy as np

    rows = tokenizer(documents, truncation=True)["input_ids"]
    info |= {"tokens": sum(map(len, rows)), "longest": max(map(len, rows))}
    # Cubes, because the scores of a text always sum to 1, and so do the squares of a normalized
    # embedding. Their means would not depend on the results.
    info["mean"] = float((np.abs(np.asarray(step(), np.float64)) ** 3).mean())
    return Workload(harness.make_step(step), memory, info)


def hfseq_texts(
    job: str, model: str, size: dict[str, Any], count: int, rows: int, weights: str
) -> Workload:
    """Classifies, embeds or ranks the texts with hfseq."""
    import hfseq
    from hfseq.modeling.sentence import CrossEncoder, CrossEncoderConfig

    module = training.hfseq_class(model).from_pretrained(weights)
    documents, tokenizer = texts(count, module.config.vocab_size)
    if job == "classify":
        pipeline = hfseq.pipeline(
            "text-classification", module, tokenizer=tokenizer, batch_size=rows
        )
        step = lambda: scores(pipeline(documents, top_k=None, truncation=True))  # noqa: E731
    elif job == "rank":
        encoder = CrossEncoder(module, tokenizer, CrossEncoderConfig())
        step = lambda: encoder.predict(pairs(documents), batch_size=rows)  # noqa: E731
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
    """Classifies texts with Transformers, or embeds or ranks them with sentence-transformers."""
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
    elif job == "rank":
        from sentence_transformers import CrossEncoder

        tokenizer.save_pretrained(weights)
        reranker = CrossEncoder(weights, device=device)
        step = lambda: reranker.predict(pairs(documents), batch_size=rows)  # noqa: E731
    else:
        from sentence_transformers import SentenceTransformer, models

        tokenizer.save_pretrained(weights)
        parts = models.Transformer(weights), models.Pooling(module.config.hidden_size, "mean")
        encoder = SentenceTransformer(modules=[*parts, models.Normalize()], device=device)
        step = lambda: encoder.encode(documents, batch_size=rows)  # noqa: E731
    return text_workload(
        step, documents, tokenizer, harness.torch_peak_bytes, training.torch_info(module)
    )


def pairs(documents: list[str]) -> list[tuple[str, str]]:
    """Returns a pair (query, document) for each document.

    The query is the same in all pairs: the first ten words of the longest document.
    """
    query = " ".join(max(documents, key=len).split()[:10])
    return [(query, document) for document in documents]


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
    "`hfseq.pipeline` is compared with Transformers' pipeline, and `model.encode` and "
    "`CrossEncoder.predict` with sentence-transformers. The texts are generated, have 2 to 150 "
    "words and are processed in batches of 32 (128 on a GPU). The other inputs are processed in "
    "batches of 8: prompts of 40 words that are continued by 32 tokens, images of 400 x 320 "
    "pixels, and five seconds of noise. Times include the tokenizers and processors. All "
    "contestants use the same random weights and must return the same results.",
    pipelines_cases,
    (harness.CASE, ("texts/s", harness.rate), harness.RATIO, harness.MEMORY),
    "ratio",
    problems=inference.inference_problems,
    remarks=pipelines_remarks,
)
