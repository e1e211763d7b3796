"""``hfseq answer``, ``tag``, ``summarize``, ``classify`` and ``embed`` on lines and files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfseq.cli import models
from hfseq.cli.text import add_json
from hfseq.errors import DataError, UsageError, atomic_replace
from hfseq.pipelines.lines import BadLine, Output, count_lines

#: Seconds without a new line after which what has come on a pipe is answered.
PAUSE = 0.1


def _add_lines(parser: argparse.ArgumentParser, what: str, long_lines: bool = True) -> None:
    """Add the flags of input, output and model."""
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file",
        metavar="FILE",
        help=f"{what} a line, or a table (.jsonl, .json, .csv, .tsv, .parquet); - is standard "
        "input",
    )
    models.add_output_file(group)
    add_json(group, "a JSON object a line: the input and the pipeline's output")
    if long_lines:
        group.add_argument(
            "--long_lines",
            choices=("truncate", "error"),
            default="truncate",
            help="a text that is longer than the model reads: truncate it, or count it as an error "
            "(truncate)",
        )
    group.add_argument(
        "--on_bad_line",
        choices=("report", "skip", "replace", "stop"),
        default="report",
        help="a line that has no answer: report gives an empty line and exit code 1 at the end, "
        "skip the same with 0, replace reads invalid UTF-8 with U+FFFD in the place of wrong "
        "bytes, stop ends there (report)",
    )
    models.add_progress(group)
    models.add_int_flags(group, ("batch_size", 32, "texts read together (32)"))
    models.add_model_flags(parser.add_argument_group("model"))


def _run(
    arguments: argparse.Namespace,
    task: str,
    options: Mapping[str, Any],
    show: Callable[[Any, Any], str],
    given: list[Any] | None = None,
) -> int:
    """Print what the pipeline says of each input; return 1 if it said nothing of one.

    ``given`` are inputs of the command line; ``show`` makes a line of an input and its answer.
    """
    if given and arguments.input_file:
        raise UsageError("give texts or --input_file, not both")
    from tqdm import tqdm

    from hfseq.pipelines.base import RejectedInput, read_inputs
    from hfseq.pipelines.tasks import pipeline

    name = arguments.input_file or "-"
    total = len(given) if given else count_lines(name)
    if not given and name == "-" and sys.stdin.isatty():
        print("reading what you type; end with Ctrl-D", file=sys.stderr)
    read: deque[tuple[str, Any]] = deque()

    def inputs() -> Iterator[Any]:
        """Keep what is read, and where it stands, until its answer comes."""
        rows = (
            enumerate(given, 1) if given else read_inputs(name, arguments.on_bad_line == "replace")
        )
        for place, one in rows:
            text = one.get("text") if isinstance(one, Mapping) else one
            if isinstance(text, str) and not text.strip() and not isinstance(text, BadLine):
                one = BadLine("", "there is no text in it")
            read.append((f"input {place}" if given else str(place), one))
            yield one

    hidden = arguments.no_progress or not sys.stderr.isatty()
    bad = count = 0
    with Output(arguments.output_file) as output:
        models.prepare_devices(arguments)
        made = pipeline(
            task,
            arguments.model,
            batch_size=arguments.batch_size,
            precision=arguments.precision,
            **options,
        )
        pause = None if total is not None else PAUSE
        with tqdm(total=total, unit=" texts", disable=hidden, file=sys.stderr) as bar:
            for answer in made.stream(inputs(), pause=pause):
                place, one = read.popleft()
                refused = isinstance(answer, RejectedInput)
                if refused:
                    bar.write(f"error: {place}: {answer}", file=sys.stderr)
                    if arguments.on_bad_line == "stop":
                        raise DataError(f"stopped at {place} (--on_bad_line stop)")
                if arguments.json:
                    said = {"error": str(answer)} if refused else {"output": answer}
                    output.write(json.dumps({"input": one, **said}, ensure_ascii=False))
                else:
                    output.write("" if refused else show(one, answer))
                bar.update()
                count, bad = count + 1, bad + refused
    if bad:
        print(f"{bad} of {count} inputs have no answer: their places are empty", file=sys.stderr)
    return 1 if bad and arguments.on_bad_line != "skip" else 0


def _line(text: str) -> str:
    """Keep a text on one line."""
    return " ".join(text.split())


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq answer``."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a model for QA")
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="what is asked")
    parser.add_argument(
        "--context", metavar="TEXT", help="where the answer stands; @FILE reads it from a file"
    )
    group = parser.add_argument_group("answers")
    models.add_int_flags(
        group,
        ("top_k", 1, "answers to a question (1)"),
        ("max_answer_len", 30, "longest answer, in tokens (30)"),
        ("max_seq_len", None, "tokens of question and context together; default: up to 384"),
        ("doc_stride", None, "tokens that windows of a long context share; default: 128"),
    )
    group.add_argument(
        "--handle_impossible_answer",
        action="store_true",
        help="say nothing where the context does not answer",
    )
    _add_lines(parser, "questions with contexts; not", long_lines=False)


def run_answer(arguments: argparse.Namespace) -> int:
    """Answer a question from a context, or those of a table with both columns."""
    given, names = None, ("top_k", "max_answer_len", "handle_impossible_answer")
    if arguments.question is not None:
        context = arguments.context
        if context is None:
            raise UsageError("give --context TEXT, or --context @FILE, with the QUESTION")
        if context.startswith("@"):
            try:
                with open(context[1:], encoding="utf-8") as file:
                    context = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--context {context}: {error}") from None
        given = [{"question": arguments.question, "context": context}]
    elif arguments.context is not None:
        raise UsageError("--context without a QUESTION")
    elif arguments.input_file in (None, "-"):
        raise UsageError(
            "give QUESTION and --context, or --input_file with a table of the columns question and "
            "context (SQuAD's files, too)"
        )
    options = {name: getattr(arguments, name) for name in names}
    for name in ("max_seq_len", "doc_stride"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    models.check_at_least_one(arguments, "top_k", "max_answer_len", "max_seq_len")

    def show(given: Any, answer: Any) -> str:
        several = answer if isinstance(answer, list) else [answer]
        if arguments.top_k == 1:
            return _line(several[0]["answer"]) if several else ""
        return "\t".join(f"{_line(one['answer'])} ({one['score']:.1%})" for one in several)

    return _run(arguments, "question-answering", options, show, given)


def add_tag(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq tag``."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a tagger")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="default: standard input")
    group = parser.add_argument_group("tags")
    strategies = ("none", "simple", "first", "average", "max")
    group.add_argument(
        "--aggregation_strategy",
        choices=strategies,
        default="first",
        help="how tokens become entities: none gives each for itself, simple joins neighbours of "
        "one tag, the others give all tokens of a word one (first)",
    )
    group.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="read long texts in windows that share so many tokens; default: they are truncated",
    )
    _add_lines(parser, "a text")


def run_tag(arguments: argparse.Namespace) -> int:
    """Find the entities of texts."""

    def show(given: Any, entities: Any) -> str:
        """Mark entities where they stand: [PER Ada] lives in [LOC Oslo]."""
        text, end, parts = str(given["text"] if isinstance(given, Mapping) else given), 0, []
        for one in entities:
            label = one.get("entity_group") or one["entity"]
            parts += [text[end : one["start"]], f"[{label} {text[one['start'] : one['end']]}]"]
            end = one["end"]
        return _line("".join([*parts, text[end:]]))

    options: dict[str, Any] = {
        "aggregation_strategy": arguments.aggregation_strategy,
        "truncation": arguments.long_lines == "truncate" or arguments.stride is not None,
    }
    if arguments.stride is not None:
        options["stride"] = arguments.stride
    return _run(arguments, "token-classification", options, show, arguments.texts)


def add_summarize(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq summarize``."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a summariser")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="default: standard input")
    group = parser.add_argument_group("search")
    models.add_int_flags(
        group,
        ("num_beams", None, "1 is greedy search; default: the model's own, else 4"),
        ("max_new_tokens", None, "longest summary; default: the model's own, else 256"),
        ("min_new_tokens", None, "no end before so many"),
        ("no_repeat_ngram_size", None, "write no n-gram of this size twice"),
    )
    group.add_argument(
        "--length_penalty", type=float, metavar="X", help="above 0 favours long summaries"
    )
    _add_lines(parser, "a text")


def run_summarize(arguments: argparse.Namespace) -> int:
    """Summarise texts, each on a line of its own."""
    names = ("num_beams", "max_new_tokens", "min_new_tokens", "no_repeat_ngram_size")
    given = {name: getattr(arguments, name) for name in (*names, "length_penalty")}
    options = {name: value for name, value in given.items() if value is not None}
    models.check_at_least_one(arguments, "num_beams", "max_new_tokens")
    options["truncation"] = arguments.long_lines == "truncate"
    show = lambda given, answer: _line(answer[0]["summary_text"])  # noqa: E731
    return _run(arguments, "summarization", options, show, arguments.texts)


def add_classify(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq classify``: what a model of pictures takes, and one of texts."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a classifier")
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="texts; for a model of pictures files, or folders of them; default: standard input",
    )
    group = parser.add_argument_group("classes")
    group.add_argument("--top_k", type=int, metavar="N", default=5, help="likeliest classes (5)")
    group.add_argument(
        "--candidate_labels",
        metavar="A,B,C",
        help="classes for a model that was trained on what follows from a text (NLI)",
    )
    models.add_int_flags(
        group, ("decode_workers", 0, "processes that decode pictures; 0: this one (0)")
    )
    _add_lines(parser, "a text")


def run_classify(arguments: argparse.Namespace) -> int:
    """Say which classes texts or pictures have."""
    from hfseq import plugins
    from hfseq.checkpoints.config import Source, class_names, read_config

    models.check_at_least_one(arguments, "top_k")
    plugins.load(arguments.plugin)
    place = Source.parse(arguments.model).location
    if not os.path.exists(os.path.join(place, "adapter_config.json")):
        names = class_names(read_config(Source.parse(arguments.model).location))
        if any("ForImageClassification" in name for name in names):
            return models.classify_images(arguments)

    def show(given: Any, answer: Any) -> str:
        if arguments.candidate_labels:
            pairs = list(zip(answer["labels"], answer["scores"], strict=True))[: arguments.top_k]
        else:
            pairs = [(one["label"], one["score"]) for one in answer]
        return ", ".join(f"{label} ({score:.1%})" for label, score in pairs)

    cut = arguments.long_lines == "truncate"
    if arguments.candidate_labels:
        options = {
            "candidate_labels": arguments.candidate_labels,
            "truncation": "only_first" if cut else False,
        }
        return _run(arguments, "zero-shot-classification", options, show, arguments.inputs)
    options = {"top_k": arguments.top_k, "truncation": cut}
    return _run(arguments, "text-classification", options, show, arguments.inputs)


def add_embed(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq embed``."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of an encoder")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="default: standard input")
    group = parser.add_argument_group("vectors")
    group.add_argument(
        "--pooling",
        metavar="NAME",
        help="mean, cls, max, lasttoken …, for a model without sentence-transformers' files",
    )
    group.add_argument("--normalize", action="store_true", help="give vectors the length 1")
    group.add_argument("--prompt", metavar="TEXT", help="put this before each text")
    group.add_argument("--prompt_name", metavar="NAME", help="a prompt that the model has")
    models.add_int_flags(group, ("truncate_dim", None, "keep the first so many features"))
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file",
        metavar="FILE",
        help="a text a line, or a table with the column text; - is standard input",
    )
    group.add_argument(
        "--output_file",
        metavar="FILE",
        help="FILE.npy is an array (texts, features) of float32; other names are lines of JSON, as "
        "standard output is",
    )
    add_json(group, "a JSON object a line: the text and its vector")
    models.add_progress(group)
    models.add_int_flags(group, ("batch_size", 32, "texts read together (32)"))
    models.add_model_flags(parser.add_argument_group("model"))


def run_embed(arguments: argparse.Namespace) -> int:
    """Write the vector of each text."""
    models.check_at_least_one(arguments, "batch_size", "truncate_dim")
    if arguments.texts and arguments.input_file:
        raise UsageError("give texts or --input_file, not both")
    import numpy as np

    from hfseq.modeling import auto
    from hfseq.pipelines.base import RejectedInput, input_text, read_inputs

    models.prepare_devices(arguments)
    name = arguments.input_file or "-"
    if not arguments.texts and name == "-" and sys.stdin.isatty():
        print("reading what you type; end with Ctrl-D", file=sys.stderr)
    rows = [(f"input {n}", text) for n, text in enumerate(arguments.texts, 1)]
    texts = []
    for place, given in rows or read_inputs(name):
        text = input_text(given, "text")
        if isinstance(text, RejectedInput) or not text.strip():
            why = text if isinstance(text, RejectedInput) else "there is no text in it"
            raise DataError(f"{place}: {why}; a vector of nothing would be compared with others")
        texts.append(str(text))
    model = auto.load(auto.FlaxAutoModel, arguments.model, precision=arguments.precision)
    vectors = model.encode(
        texts,
        prompt=arguments.prompt,
        prompt_name=arguments.prompt_name,
        batch_size=arguments.batch_size,
        pooling=arguments.pooling,
        normalize_embeddings=arguments.normalize,
        truncate_dim=arguments.truncate_dim,
        show_progress_bar=sys.stderr.isatty() and not arguments.no_progress,
    )
    if arguments.output_file and arguments.output_file.endswith(".npy"):
        with (
            atomic_replace(Path(arguments.output_file)) as temporary,
            open(temporary, "wb") as file,
        ):
            np.save(file, vectors)
        return 0
    with Output(arguments.output_file) as output:
        for text, vector in zip(texts, vectors.tolist(), strict=True):
            line = {"input": text, "output": vector} if arguments.json else vector
            output.write(json.dumps(line, ensure_ascii=False))
    return 0
