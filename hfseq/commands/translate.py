"""``hfseq translate``, which is also ``scripts/translate.py``: its flags and what it prints.

What is heavy is imported inside the functions, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hfseq.errors import CLOSED_PIPE, DataError, UsageError, run_command
from hfseq.translation_files import Output, count_lines, open_input, read_lines
from hfseq.translation_stream import LONG_LINES

if TYPE_CHECKING:
    from hfseq.translation import Translation, Translator

BAD_LINES = ("report", "skip", "replace", "stop")
DEVICES = ("cpu", "cuda", "gpu", "tpu")


class Source(NamedTuple):
    """Lines, what messages call them, and how many there are, where that is known."""

    lines: Iterable[str]
    name: str
    total: int | None


def add_translate(parser: argparse.ArgumentParser, aliases: bool = False) -> None:
    """Add the flags; ``aliases`` adds those of translate-ai's script."""
    text = "text to translate; default: standard input"
    if aliases:  # the first word is the model then, unless --checkpoint-file names it
        text = f"MODEL, a directory or Hub name; then {text}"
        parser.add_argument("--checkpoint-file", metavar="MODEL", help="the same as MODEL")
        parser.add_argument("--english-query", metavar="TEXT", help="the same as TEXT")
    else:
        parser.add_argument(
            "model", metavar="MODEL", help="directory or Hub name of an encoder-decoder"
        )
    parser.add_argument("texts", metavar="TEXT", nargs="*", help=text)
    _take_late_words(parser)
    _add_files(parser)
    _add_search(parser)
    _add_model(parser)


def _take_late_words(parser: argparse.ArgumentParser) -> None:
    """Let TEXT come after flags too: argparse gives up on ``*`` at the first flag."""
    parse: Any = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        found, rest = parse(args, namespace)
        if not any(word.startswith("-") for word in rest):
            found.texts, rest = [*found.texts, *rest], []
        return found, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument("--input_file", metavar="FILE", help="a text a line; - is standard input")
    group.add_argument(
        "--output_file", metavar="FILE", help="default: standard output; FILE.part until complete"
    )
    group.add_argument("--json", action="store_true", help="a JSON object a line, with all of it")
    group.add_argument("--scores", action="store_true", help="score and tab before each text")
    group.add_argument(
        "--long_lines", choices=LONG_LINES, default="truncate",
        help="a text that is longer than the model reads: truncate it, split it at sentences and "
        "translate all of it, or count it as an error (truncate)",
    )  # fmt: skip
    group.add_argument(
        "--on_bad_line", choices=BAD_LINES, default="report",
        help="a line that cannot be translated: report gives an empty line and exit code 1 at the "
        "end, skip the same with 0, replace translates invalid UTF-8 with U+FFFD in the place of "
        "wrong bytes, stop ends there (report)",
    )  # fmt: skip
    group.add_argument("--no_progress", action="store_true", help="no progress bar on a terminal")


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    group.add_argument("--num_beams", default=4, help="1 is greedy search (4)", **number)
    group.add_argument(
        "--num_return_sequences", default=1, help="best translations of each text (1)", **number
    )
    group.add_argument("--batch_size", default=32, help="texts translated together (32)", **number)
    group.add_argument(
        "--max_source_length", help="tokens; default: what the model reads", **number
    )
    group.add_argument(
        "--max_new_tokens", help="longest translation; default: twice the source and more", **number
    )
    group.add_argument(
        "--length_penalty", type=float, metavar="X", help="above 0 favours long translations"
    )
    group.add_argument(
        "--length_penalty_type", choices=("transformers", "gnmt"),
        help="divide by length**X, or by ((5+length)/6)**X as GNMT does (transformers)",
    )  # fmt: skip


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--source_lang", metavar="CODE", help="where the model has several")
    group.add_argument("--target_lang", metavar="CODE", help="where the model has several")
    group.add_argument("--source_prefix", metavar="TEXT", help="put this before each text")
    group.add_argument(
        "--precision", metavar="NAME", default="float32", help="float32, bfloat16 … (float32)"
    )
    group.add_argument("--device", choices=DEVICES, help="refuse to run on another kind of device")


def main(argv: Sequence[str] | None = None, description: str | None = None) -> int:
    """Run ``scripts/translate.py`` and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(
        lambda: run_translate(script_arguments(words, description)), debug="--debug" in words
    )


def script_arguments(argv: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """Parse the flags of ``scripts/translate.py``, some of which have two spellings."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_translate(parser, aliases=True)
    parser.add_argument("--plugin", action="append", metavar="FILE", default=[], help="load it too")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    words = list(arguments.texts)
    if arguments.checkpoint_file is not None:
        words.insert(0, arguments.checkpoint_file)
    if arguments.english_query is not None:
        words.append(arguments.english_query)
    if not words:
        raise UsageError("no model: give MODEL (a directory or a name on the Hub) first")
    arguments.model, arguments.texts = words[0], words[1:]
    return arguments


def run_translate(arguments: argparse.Namespace) -> int:
    """Translate what the flags say, and return 1 if a line could not be."""
    _check(arguments)
    name = "text" if arguments.texts else arguments.input_file or "-"
    lines: Iterable[str]
    if arguments.texts:
        lines = [line for text in arguments.texts for line in text.split("\n")]
        total: int | None = len(lines)
    else:
        total = count_lines(name)
        lines = read_lines(open_input(name), _shown(name), arguments.on_bad_line == "replace")
    try:
        with Output(arguments.output_file) as output:
            source = Source(lines, _shown(name), total)
            return _translate(arguments, _translator(arguments), source, output)
    except BrokenPipeError:  # whoever read has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _check(arguments: argparse.Namespace) -> None:
    problems = []
    if arguments.texts and arguments.input_file:
        problems.append("give TEXT or --input_file, not both")
    if arguments.scores and arguments.num_beams == 1:
        problems.append("--scores needs --num_beams above 1: greedy search has no scores")
    if problems:
        raise UsageError("; ".join(problems))
    if not arguments.texts and arguments.input_file in (None, "-") and sys.stdin.isatty():
        print("translating what you type; end with Ctrl-D", file=sys.stderr)


def _translator(arguments: argparse.Namespace) -> Translator:
    from hfseq import plugins
    from hfseq.training.devices import require_device, use_compilation_cache
    from hfseq.translation import Translator

    plugins.load(arguments.plugin)
    require_device(arguments.device)
    use_compilation_cache(None)
    same = (
        *("num_beams", "num_return_sequences", "batch_size", "max_source_length", "long_lines"),
        *("max_new_tokens", "length_penalty", "length_penalty_type", "precision"),
        *("source_lang", "target_lang", "source_prefix"),
    )
    return Translator.from_pretrained(
        arguments.model, **{option: getattr(arguments, option) for option in same}
    )


def _translate(
    arguments: argparse.Namespace, translator: Translator, source: Source, output: Output
) -> int:
    options = {} if source.total is None else {"pause": None}  # all of a file is there
    stream = translator.stream(source.lines, **options)
    bad = unended = count = 0
    with _progress(arguments, source.total) as bar:
        for translation in stream:
            place = f"{source.name}:{translation.line}"
            for warning in translation.warnings:
                bar.write(f"warning: {place}: {warning}", file=sys.stderr)
            if translation.error:
                bar.write(f"error: {place}: {translation.error}", file=sys.stderr)
                if arguments.on_bad_line == "stop":
                    raise DataError(f"stopped at {place} (--on_bad_line stop)")
            output.write(_render(translation, arguments))
            bar.update()
            count += 1
            bad += translation.error is not None
            unended += any(not hypothesis.ended for hypothesis in translation.hypotheses)
    _summary(bad, unended, count)
    return 1 if bad and arguments.on_bad_line != "skip" else 0


def _summary(bad: int, unended: int, count: int) -> None:
    if bad:
        text = f"{bad} of {count} lines could not be translated: their places are empty"
        print(text, file=sys.stderr)
    if unended:
        text = f"{unended} of {count} translations reached the limit of new tokens without an end"
        print(f"{text} (--max_new_tokens raises it)", file=sys.stderr)


def _render(translation: Translation, arguments: argparse.Namespace) -> str:
    """Return the output of a line: one line for each hypothesis, or a JSON object."""
    if arguments.json:
        record: dict[str, Any] = {
            "line": translation.line,
            "source": str(translation.source),
            "translations": [
                {"text": one.text, "score": one.score, "ended": one.ended}
                for one in translation.hypotheses
            ],
            "warnings": translation.warnings,
        }
        if translation.error:
            record["error"] = translation.error
        return json.dumps(record, ensure_ascii=False)
    texts = [one.text for one in translation.hypotheses]
    if arguments.scores:
        texts = [
            f"{'' if one.score is None else format(one.score, '.4f')}\t{one.text}"
            for one in translation.hypotheses
        ]
    # As many lines for each text, so that line numbers can be counted on.
    return "\n".join(texts or [""] * arguments.num_return_sequences)


def _progress(arguments: argparse.Namespace, total: int | None) -> Any:
    from tqdm import tqdm

    hidden = arguments.no_progress or not sys.stderr.isatty()
    return tqdm(total=total, unit=" lines", disable=hidden, file=sys.stderr)


def _shown(name: str) -> str:
    return "<stdin>" if name == "-" else name
