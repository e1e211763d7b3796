"""``hfseq generate``: its flags, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from hfseq.commands.terminal import paint
from hfseq.errors import UsageError
from hfseq.translation_files import open_input, read_lines

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
    _check(arguments, options)
    prompts = list(arguments.prompts) or _read(arguments)
    if not prompts:
        raise UsageError("no prompt: the input is empty")
    from hfseq import plugins
    from hfseq.training.devices import require_device, use_compilation_cache
    from hfseq.writer import Writer

    plugins.load(arguments.plugin)
    require_device(arguments.device)
    use_compilation_cache(None)
    writer = Writer.from_pretrained(arguments.model, arguments.precision)
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


def _check(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
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
