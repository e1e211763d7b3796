"""``hfseq translate``, which is also ``scripts/translate.py``: its flags and what it prints.

What is heavy is imported inside the functions, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hfseq.cli.text import paint
from hfseq.errors import CLOSED_PIPE, DataError, UsageError, run_command
from hfseq.pipelines.fill_mask import MASK, fill_masks
from hfseq.pipelines.lines import LONG_LINES, Output, count_lines, open_input, read_lines

if TYPE_CHECKING:
    from hfseq.pipelines.translation import Translation, Translator

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
    _check_translate(arguments)
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


def _check_translate(arguments: argparse.Namespace) -> None:
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
    from hfseq.pipelines.translation import Translator
    from hfseq.training.output import require_device, use_compilation_cache

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


def add_fill_mask(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq fill-mask``."""
    parser.add_argument("model", metavar="DIR", help="directory or Hub name of a masked LM")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help=f"text with {MASK} where a token is to be guessed"
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="guesses a mask (5)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_fill_mask(arguments: argparse.Namespace) -> int:
    """Print the likeliest tokens for each mask of each text."""
    from hfseq import plugins

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: give a number of at least 1")
    plugins.load(arguments.plugin)
    found = list(
        zip(
            arguments.texts,
            fill_masks(arguments.model, arguments.texts, arguments.top),
            strict=True,
        )
    )
    if arguments.json:
        rows = [
            {"text": text, "masks": [_objects(mask) for mask in masks]} for text, masks in found
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    for text, masks in found:
        print(text)
        for number, guesses in enumerate(masks, 1):
            if len(masks) > 1:
                print(f"  mask {number}")
            for token, probability in guesses:
                print(f"  {probability:6.1%}  {token}")
    return 0


def _objects(guesses: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"token": token, "probability": probability} for token, probability in guesses]


EXAMPLES = """hfseq generate my-gpt2 "Once upon a time"
hfseq generate my-gpt2 "The law" --do_sample --temperature 0.8 --top_p 0.95 --seed 7
hfseq generate my-t5 --input_file questions.txt --num_beams 4 --json > answers.jsonl
cat chapter.txt | hfseq generate my-gpt2 --whole --max_new_tokens 200"""


#: Options of GenerationConfig: name, type, help.
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("max_new_tokens", int, "tokens to write; default: the model's own max_length, else 64"),
    ("min_new_tokens", int, "no end before so many"),
    ("num_beams", int, "1 is greedy search, or sampling"),
    ("num_return_sequences", int, "samples, or best beams, for each prompt"),
    ("temperature", float, "below 1 favours likely tokens"),
    ("top_k", int, "sample from the k likeliest; 0 from all"),
    ("top_p", float, "sample from the likeliest that together have this probability"),
    ("min_p", float, "sample from those with this share of the likeliest's probability"),
    ("typical_p", float, "locally typical sampling"),
    ("repetition_penalty", float, "above 1 avoids tokens that are there already"),
    ("no_repeat_ngram_size", int, "write no n-gram of this size twice"),
    ("length_penalty", float, "of beams; above 0 favours long texts"),
)


#: What has no effect without sampling.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those of the search have the names of ``transformers.GenerationConfig``."""
    parser.add_argument("model", metavar="DIR", help="directory or Hub name of a language model")
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="what to continue, or the encoder's input"
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file", metavar="FILE",
        help="a prompt a line; - is standard input, the default where there is no PROMPT",
    )  # fmt: skip
    group.add_argument("--whole", action="store_true", help="all of the input is one prompt")
    group.add_argument("--json", action="store_true", help="a JSON object a line, one a prompt")
    group.add_argument(
        "--continuation_only", action="store_true", help="print what is new, not the prompt"
    )
    group.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=None,
        help="print tokens as they come; default: on a terminal, for one prompt without beams",
    )  # fmt: skip
    group = parser.add_argument_group("search")
    group.add_argument("--do_sample", action="store_true", help="draw tokens at random")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (0)")
    for name, kind, text in OPTIONS:
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--precision", metavar="NAME", default="float32", help="float32, bfloat16 … (float32)"
    )
    group.add_argument("--device", help="refuse to run on another kind of device", metavar="NAME")


def run_generate(arguments: argparse.Namespace) -> int:
    """Write for each prompt."""
    options = _options(arguments)
    _check_generate(arguments, options)
    prompts = list(arguments.prompts) or _read(arguments)
    if not prompts:
        raise UsageError("no prompt: the input is empty")
    from hfseq import plugins
    from hfseq.pipelines.text_generation import TextGenerator
    from hfseq.training.output import require_device, use_compilation_cache

    plugins.load(arguments.plugin)
    require_device(arguments.device)
    use_compilation_cache(None)
    writer = TextGenerator.from_pretrained(arguments.model, arguments.precision)
    plain = options.get("num_beams", 1) == 1 == options.get("num_return_sequences", 1)
    possible = len(prompts) == 1 and plain and not arguments.json
    if arguments.stream and not possible:
        raise UsageError("--stream needs one prompt, one sequence, no beams and no --json")
    if possible and (arguments.stream or arguments.stream is None and sys.stdout.isatty()):
        return _stream(writer, prompts[0], options, arguments)
    for number, prompt in enumerate(prompts, 1):
        texts = writer.write(prompt, **options)
        if arguments.json:
            rows = [{"text": one.text, "tokens": one.tokens, "ended": one.ended} for one in texts]
            print(json.dumps({"prompt": prompt, "sequences": rows}, ensure_ascii=False), flush=True)
            continue
        for which, one in enumerate(texts, 1):
            if len(prompts) * len(texts) > 1:
                of = f"{number}" + (f".{which}" if len(texts) > 1 else "")
                print(paint(f"== {of} ==", "faint"))
            shown = writer.continues and not arguments.continuation_only
            print((prompt if shown else "") + one.text, flush=True)
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for, as keywords of ``generate``."""
    given = {name: getattr(arguments, name) for name, _, _ in OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    if arguments.do_sample:
        options |= {"do_sample": True, "prng_key": arguments.seed}
    return options


def _check_generate(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    problems = []
    if arguments.prompts and (arguments.input_file or arguments.whole):
        problems.append("give PROMPT, or --input_file and --whole, not both")
    idle = [name for name in SAMPLING if name in options] if not arguments.do_sample else []
    if idle:
        problems.append(f"--{idle[0]} needs --do_sample: it changes what is drawn at random")
    count = options.get("num_return_sequences", 1)
    if count > max(1, options.get("num_beams", 1)) and not arguments.do_sample:
        problems.append(
            f"--num_return_sequences {count} needs --do_sample, or as many --num_beams: greedy "
            "search writes one text"
        )
    problems += [
        f"--{name} {options[name]}: give a number of at least 1"
        for name in ("max_new_tokens", "num_beams", "num_return_sequences")
        if options.get(name, 1) < 1
    ]
    if problems:
        raise UsageError("; ".join(problems))
    if not arguments.prompts and arguments.input_file in (None, "-") and sys.stdin.isatty():
        print("continuing what you type; end with Ctrl-D", file=sys.stderr)


def _read(arguments: argparse.Namespace) -> list[str]:
    name = arguments.input_file or "-"
    lines: Iterator[str] = read_lines(open_input(name), "<stdin>" if name == "-" else name)
    found = []
    for number, line in enumerate(lines, 1):
        if problem := getattr(line, "problem", None):
            raise UsageError(f"{name}:{number}: {problem}")
        found.append(str(line))
    return ["\n".join(found)] if arguments.whole and found else [line for line in found if line]


def _stream(writer: Any, prompt: str, options: dict[str, Any], arguments: Any) -> int:
    if writer.continues and not arguments.continuation_only:
        print(paint(prompt, "faint"), end="", flush=True)
    for piece in writer.stream(prompt, **options):
        print(piece, end="", flush=True)
    print()
    return 0
