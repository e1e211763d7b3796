"""Command-line interface of ``hfseq answer``, ``tag``, ``summarize``, ``classify``, ``embed``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfseq.cli import flags, models
from hfseq.errors import DataError, UsageError, atomic_replace
from hfseq.pipelines.lines import BadLine, Output, count_lines

TEXT_INPUT = (
    "File with one text per line, or a table with the column text (.jsonl, .json, .csv, .tsv, "
    ".parquet). Default: standard input (-)."
)


def _add_lines(parser: argparse.ArgumentParser, input_help: str, long_lines: bool = True) -> None:
    """Adds the flags for the input, the output and the model.

    Args:
        parser: The parser of the command.
        input_help: The help text of ``--input_file``.
        long_lines: Whether to add ``--long_lines``.
    """
    group = parser.add_argument_group("input and output")
    flags.add_flag(group, "input_file", help_text=input_help)
    flags.add_output_flags(
        group, "Write one JSON object per line, with the input and the pipeline's output."
    )
    if long_lines:
        group.add_argument(
            "--long_lines",
            choices=("truncate", "error"),
            default="truncate",
            help="Truncate texts that exceed the model's maximum length, or treat them as errors. "
            "Default: truncate.",
        )
    group.add_argument(
        "--on_bad_line",
        choices=("report", "skip", "replace", "stop"),
        default="report",
        help="How to handle an invalid input. 'report': write an empty line, and exit with code 1 "
        "at the end. 'skip': write an empty line, and exit with code 0. 'replace': replace invalid "
        "UTF-8 by U+FFFD, and process the line. 'stop': exit at the first invalid input. Default: "
        "report.",
    )
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def _run(
    arguments: argparse.Namespace,
    task: str,
    options: Mapping[str, Any],
    show: Callable[[Any, Any], str],
    direct_inputs: list[Any] | None = None,
) -> int:
    """Runs a pipeline on each input and prints the outputs. Returns 1 if an input is rejected.

    Args:
        arguments: The flags of the command.
        task: The task of the pipeline.
        options: Options of the pipeline.
        show: Formats an input and its output as a line.
        direct_inputs: Inputs from the command line, instead of a file.
    """
    if direct_inputs and arguments.input_file:
        raise UsageError("use either positional texts or --input_file, not both")
    from tqdm import tqdm

    from hfseq.pipelines.base import read_inputs
    from hfseq.pipelines.factory import pipeline

    name = arguments.input_file or "-"
    total = len(direct_inputs) if direct_inputs else count_lines(name)
    if not direct_inputs and name == "-" and sys.stdin.isatty():
        print("reading lines from the terminal; press Ctrl-D to finish", file=sys.stderr)
    read: deque[tuple[str, Any]] = deque()

    def inputs() -> Iterator[Any]:
        """Yields the inputs, and stores each with its position until its output arrives."""
        rows = (
            enumerate(direct_inputs, 1)
            if direct_inputs
            else read_inputs(name, arguments.on_bad_line == "replace")
        )
        for position, value in rows:
            text = value.get("text") if isinstance(value, Mapping) else value
            if isinstance(text, str) and not text.strip() and not isinstance(text, BadLine):
                value = BadLine("", "the text is empty")
            read.append((f"input {position}" if direct_inputs else str(position), value))
            yield value

    hidden = arguments.disable_tqdm or not sys.stderr.isatty()
    failures = count = 0
    with Output(arguments.output_file) as output:
        models.prepare_devices(arguments)
        task_pipeline = pipeline(
            task,
            arguments.model,
            batch_size=arguments.batch_size,
            precision=arguments.precision,
            **options,
        )
        pause = None if total is not None else models.PAUSE
        with tqdm(total=total, unit=" texts", disable=hidden, file=sys.stderr) as bar:
            for answer in task_pipeline.stream(inputs(), pause=pause):
                position, value = read.popleft()
                refused = answer.error is not None
                for warning in answer.warnings:
                    bar.write(f"warning: {position}: {warning}", file=sys.stderr)
                if refused:
                    bar.write(f"error: {position}: {answer.error}", file=sys.stderr)
                    if arguments.on_bad_line == "stop":
                        raise DataError(f"stopped at {position} (--on_bad_line stop)")
                if arguments.json:
                    record = {"error": answer.error} if refused else {"output": answer.output}
                    output.write(json.dumps({"input": value, **record}, ensure_ascii=False))
                else:
                    output.write("" if refused else show(value, answer.output))
                bar.update()
                count, failures = count + 1, failures + refused
    if failures:
        print(
            f"{failures} of {count} inputs were rejected and are empty in the output",
            file=sys.stderr,
        )
    return 1 if failures and arguments.on_bad_line != "skip" else 0


def _line(text: str) -> str:
    """Joins the lines of a text into one line."""
    return " ".join(text.split())


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq answer``."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of a QA model.")
    parser.add_argument(
        "question", metavar="QUESTION", nargs="?", help="Question to answer from --context."
    )
    parser.add_argument(
        "--context", metavar="TEXT", help="Text that contains the answer; @FILE reads a file."
    )
    group = parser.add_argument_group("answers")
    flags.add_flag(group, "top_k", 1)
    models.add_int_flags(
        group,
        ("max_answer_len", 30, "Maximum answer length in tokens. Default: 30."),
        (
            "max_seq_len",
            None,
            "Maximum tokens of a question and a window of its context. Default: 384, or the "
            "model's maximum if that is lower.",
        ),
        ("doc_stride", None, "Overlap of the windows of a long context in tokens. Default: 128."),
    )
    group.add_argument(
        "--handle_impossible_answer",
        action="store_true",
        help="Return an empty answer if the context does not contain one.",
    )
    _add_lines(
        parser,
        "Table with the columns question and context (.jsonl, .json, .csv, .tsv, .parquet), or a "
        "SQuAD file.",
        long_lines=False,
    )


def run_answer(arguments: argparse.Namespace) -> int:
    """Answers one question from a context, or the questions of a table."""
    inputs, names = None, ("top_k", "max_answer_len", "handle_impossible_answer")
    if arguments.question is not None:
        context = arguments.context
        if context is None:
            raise UsageError("QUESTION requires --context TEXT or --context @FILE")
        if context.startswith("@"):
            try:
                with open(context[1:], encoding="utf-8") as file:
                    context = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--context {context}: {error}") from None
        inputs = [{"question": arguments.question, "context": context}]
    elif arguments.context is not None:
        raise UsageError("--context requires a QUESTION")
    elif arguments.input_file in (None, "-"):
        raise UsageError(
            "use either QUESTION and --context, or --input_file with a SQuAD file or a table with "
            "the columns question and context"
        )
    options = {name: getattr(arguments, name) for name in names}
    for name in ("max_seq_len", "doc_stride"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    models.check_at_least_one(arguments, "max_answer_len", "max_seq_len")

    def show(value: Any, answer: Any) -> str:
        answers = answer if isinstance(answer, list) else [answer]
        if arguments.top_k == 1:
            return _line(answers[0]["answer"]) if answers else ""
        return "\t".join(
            f"{_line(candidate['answer'])} ({candidate['score']:.1%})" for candidate in answers
        )

    return _run(arguments, "question-answering", options, show, inputs)


def add_tag(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq tag``."""
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or Hub name of a token classification model."
    )
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="Text to tag. Default: standard input."
    )
    group = parser.add_argument_group("tags")
    strategies = ("none", "simple", "first", "average", "max")
    group.add_argument(
        "--aggregation_strategy",
        choices=strategies,
        default="first",
        help="Keep tokens separate (none), merge adjacent tokens with the same tag (simple), or "
        "assign one tag per word (first, average, max). Default: first.",
    )
    group.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="Read long texts in windows that overlap by this many tokens. Default: handle long "
        "texts according to --long_lines.",
    )
    _add_lines(parser, TEXT_INPUT)


def run_tag(arguments: argparse.Namespace) -> int:
    """Finds the entities in texts."""

    def show(value: Any, entities: Any) -> str:
        """Marks the entities in the text: [PER Ada] lives in [LOC Oslo]."""
        text, end, parts = str(value["text"] if isinstance(value, Mapping) else value), 0, []
        for entity in entities:
            label = entity.get("entity_group") or entity["entity"]
            parts += [
                text[end : entity["start"]],
                f"[{label} {text[entity['start'] : entity['end']]}]",
            ]
            end = entity["end"]
        return _line("".join([*parts, text[end:]]))

    options: dict[str, Any] = {
        "aggregation_strategy": arguments.aggregation_strategy,
        "truncation": arguments.long_lines == "truncate" or arguments.stride is not None,
    }
    if arguments.stride is not None:
        options["stride"] = arguments.stride
    return _run(arguments, "token-classification", options, show, arguments.texts)


def add_summarize(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq summarize``."""
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or Hub name of a summarization model."
    )
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="Text to summarize. Default: standard input."
    )
    group = parser.add_argument_group("search")
    flags.add_generation_flag(group, "num_beams", default_text="the model's, or 4")
    flags.add_generation_flag(group, "max_new_tokens", default_text="the model's, or 256")
    for name in ("min_new_tokens", "no_repeat_ngram_size", "length_penalty"):
        flags.add_generation_flag(group, name)
    _add_lines(parser, TEXT_INPUT)


def run_summarize(arguments: argparse.Namespace) -> int:
    """Summarizes texts, one summary per line."""
    names = ("num_beams", "max_new_tokens", "min_new_tokens", "no_repeat_ngram_size")
    values = {name: getattr(arguments, name) for name in (*names, "length_penalty")}
    options = {name: value for name, value in values.items() if value is not None}
    options["truncation"] = arguments.long_lines == "truncate"
    show = lambda values, answer: _line(answer[0]["summary_text"])  # noqa: E731
    return _run(arguments, "summarization", options, show, arguments.texts)


def add_classify(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq classify``, for image and text classification models."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of a classifier.")
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="Text, or image file or directory for an image model. Default: texts from standard "
        "input.",
    )
    group = parser.add_argument_group("classes")
    flags.add_flag(group, "top_k", 5)
    group.add_argument(
        "--candidate_labels",
        metavar="A,B,C",
        help="Comma-separated classes for zero-shot classification with an NLI model.",
    )
    models.add_int_flags(
        group,
        ("decode_workers", 0, "Processes that decode images; 0 uses the main process. Default: 0."),
    )
    _add_lines(parser, TEXT_INPUT)


def run_classify(arguments: argparse.Namespace) -> int:
    """Classifies texts or images."""
    from hfseq import plugins
    from hfseq.checkpoints.config import Source, class_names, read_config

    plugins.load(arguments.plugin)
    location = Source.parse(arguments.model).location
    if not os.path.exists(os.path.join(location, "adapter_config.json")):
        names = class_names(read_config(Source.parse(arguments.model).location))
        if any("ForImageClassification" in name for name in names):
            return models.classify_images(arguments)

    def show(value: Any, answer: Any) -> str:
        if arguments.candidate_labels:
            pairs = list(zip(answer["labels"], answer["scores"], strict=True))[: arguments.top_k]
        else:
            pairs = [(prediction["label"], prediction["score"]) for prediction in answer]
        return ", ".join(f"{label} ({score:.1%})" for label, score in pairs)

    truncate = arguments.long_lines == "truncate"
    if arguments.candidate_labels:
        options = {
            "candidate_labels": arguments.candidate_labels,
            "truncation": "only_first" if truncate else False,
        }
        return _run(arguments, "zero-shot-classification", options, show, arguments.inputs)
    options = {"top_k": arguments.top_k, "truncation": truncate}
    return _run(arguments, "text-classification", options, show, arguments.inputs)


def add_embed(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq embed``."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of an encoder.")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="Text to embed. Default: standard input."
    )
    group = parser.add_argument_group("vectors")
    group.add_argument(
        "--pooling",
        metavar="NAME",
        help="Pooling, e.g. mean, cls, max or lasttoken. Default: the pooling in the files of "
        "sentence-transformers.",
    )
    group.add_argument(
        "--normalize", action="store_true", help="Normalize the vectors to length 1."
    )
    group.add_argument("--prompt", metavar="TEXT", help="Prompt before each text. Default: none.")
    group.add_argument(
        "--prompt_name",
        metavar="NAME",
        help="Use the prompt with this name in the model's sentence-transformers files.",
    )
    models.add_int_flags(
        group, ("truncate_dim", None, "Number of features to keep per vector. Default: all.")
    )
    group.add_argument(
        "--task",
        choices=("query", "document"),
        help="Encode the texts as queries or as documents. The model's prompt with this name "
        "precedes each text. Default: neither.",
    )
    group.add_argument(
        "--quantize",
        choices=("int8", "uint8", "binary", "ubinary"),
        help="Quantize dense vectors as sentence-transformers does. Default: float32 vectors.",
    )
    group = parser.add_argument_group("input and output")
    flags.add_flag(group, "input_file", help_text=TEXT_INPUT)
    flags.add_output_flags(
        group,
        "Write a JSON object with the text and its vector per line, instead of only the vector.",
        "Output file. FILE.npy becomes an array (texts, features), FILE.npz a SciPy array of "
        "sparse vectors or an array of token vectors per text, other files JSON lines.",
    )
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_embed(arguments: argparse.Namespace) -> int:
    """Computes the embedding of each text."""
    models.check_at_least_one(arguments, "truncate_dim")
    if arguments.texts and arguments.input_file:
        raise UsageError("use either positional texts or --input_file, not both")
    import numpy as np

    from hfseq.modeling.sentence import SparseEncoder
    from hfseq.pipelines.base import RejectedInput, input_text, read_inputs

    models.prepare_devices(arguments)
    name = arguments.input_file or "-"
    if not arguments.texts and name == "-" and sys.stdin.isatty():
        print("reading lines from the terminal; press Ctrl-D to finish", file=sys.stderr)
    rows = [(f"input {n}", text) for n, text in enumerate(arguments.texts, 1)]
    texts = []
    for position, value in rows or read_inputs(name):
        text = input_text(value, "text")
        if isinstance(text, RejectedInput) or not text.strip():
            reason = text if isinstance(text, RejectedInput) else "the text is empty"
            raise DataError(
                f"{position}: {reason}. Remove empty texts: their embeddings are meaningless"
            )
        texts.append(str(text))
    model = _load_encoder(arguments)
    options: dict[str, Any] = {
        "prompt": arguments.prompt,
        "prompt_name": arguments.prompt_name,
        "batch_size": arguments.batch_size,
        "show_progress_bar": sys.stderr.isatty() and not arguments.disable_tqdm,
    }
    if isinstance(model, SparseEncoder):
        for name, value in _DENSE_OPTIONS.items():
            if getattr(arguments, name) != value:
                raise UsageError(f"--{name} does not apply to sparse vectors")
    else:
        options |= {
            "normalize_embeddings": arguments.normalize,
            "truncate_dim": arguments.truncate_dim,
            "precision": arguments.quantize or "float32",
        }
    tasks = {"query": model.encode_query, "document": model.encode_document}
    vectors = tasks.get(arguments.task, model.encode)(texts, **options)
    file = arguments.output_file or ""
    is_dense = isinstance(vectors, np.ndarray)
    if file.endswith((".npy", ".npz")):
        if is_dense != file.endswith(".npy"):
            raise UsageError(
                f"--output_file {file}: dense vectors are written as .npy, sparse vectors and "
                "token vectors as .npz"
            )
        with atomic_replace(Path(file)) as temporary, open(temporary, "wb") as output_file:
            if is_dense:
                np.save(output_file, vectors)
            elif isinstance(model, SparseEncoder):
                from scipy.sparse import save_npz

                save_npz(output_file, vectors)
            else:
                np.savez(output_file, **{str(number): rows for number, rows in enumerate(vectors)})
        return 0
    if isinstance(model, SparseEncoder):
        values: list[Any] = [dict(tokens) for tokens in model.decode(vectors)]
    else:
        values = [vector.tolist() for vector in vectors]
    with Output(arguments.output_file) as output:
        for text, value in zip(texts, values, strict=True):
            line = {"input": text, "output": value} if arguments.json else value
            output.write(json.dumps(line, ensure_ascii=False))
    return 0


#: Flags of ``hfseq embed`` that only apply to dense vectors, with their defaults.
_DENSE_OPTIONS = {"normalize": False, "truncate_dim": None, "quantize": None}


def _load_encoder(arguments: argparse.Namespace) -> Any:
    """Loads the encoder of ``hfseq embed``. ``--pooling`` makes any encoder a bi-encoder."""
    from hfseq.modeling import auto, sentence
    from hfseq.pipelines import load_tokenizer

    if arguments.pooling is not None:
        config = sentence.SentenceConfig((arguments.pooling,))
        model = auto.load(auto.FlaxAutoModel, arguments.model, precision=arguments.precision)
        return sentence.SentenceEncoder(model, load_tokenizer(model, arguments.model), config)
    encoder = sentence.RetrievalModel.from_pretrained(
        arguments.model, precision=arguments.precision
    )
    if not isinstance(encoder, sentence.TextEncoder):
        raise UsageError(
            f"'{arguments.model}' is a cross-encoder, which scores pairs: use hfseq rank"
        )
    return encoder
