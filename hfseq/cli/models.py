"""``hfseq fill-mask``, ``generate``, ``translate``, ``transcribe``, ``caption``.

``translate`` is also ``scripts/translate.py``. What is heavy is imported inside the functions, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.cli.text import add_json, colorize, print_json
from hfseq.errors import DataError, UsageError, run_command, write_atomically
from hfseq.pipelines.lines import LONG_LINE_POLICIES, Output, count_lines, open_input, read_lines

if TYPE_CHECKING:
    from hfseq.pipelines.translation import Translation

EXAMPLES = """hfseq generate my-gpt2 "Once upon a time"
hfseq generate my-gpt2 "The law" --do_sample --temperature 0.8 --top_p 0.95 --seed 7
hfseq generate my-t5 --input_file questions.txt --num_beams 4 --json > answers.jsonl
cat chapter.txt | hfseq generate my-gpt2 --whole --max_new_tokens 200"""

#: What stands for a mask, whatever the tokenizer calls it.
MASK = "<mask>"

#: Options of GenerationConfig: name, type, help.
OPTIONS: tuple[tuple[str, type, str], ...] = (
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

#: Flags that a Translator takes under the same names.
TRANSLATOR_OPTIONS = (
    *("num_beams", "num_return_sequences", "batch_size", "max_source_length", "long_lines"),
    *("max_new_tokens", "length_penalty", "length_penalty_type", "precision"),
    *("source_lang", "target_lang", "source_prefix"),
)


def add_model_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of all commands that compute."""
    group.add_argument(
        "--precision", metavar="NAME", default="float32", help="float32, bfloat16 … (float32)"
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda", "gpu", "tpu"),
        help="refuse to run on another kind of device",
    )


def add_int_flags(group: argparse._ActionsContainer, *flags: tuple[str, int | None, str]) -> None:
    """Add flags of whole numbers: name, default, help."""
    for name, default, text in flags:
        group.add_argument(f"--{name}", type=int, metavar="N", default=default, help=text)


def add_progress(group: argparse._ActionsContainer) -> None:
    """Add the flag that leaves the progress bar out."""
    group.add_argument("--no_progress", action="store_true", help="no progress bar on a terminal")


def add_output_file(group: argparse._ActionsContainer) -> None:
    """Add the flag of the file that lines go to."""
    group.add_argument(
        "--output_file", metavar="FILE", help="default: standard output; FILE.part until complete"
    )


def check_at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse flags of numbers that are 0 or less."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: give a number of at least 1")


def prepare_devices(arguments: argparse.Namespace) -> None:
    """Load the plugins, and see that the device is the one that was asked for."""
    from hfseq.training.output_directory import require_device, use_compilation_cache

    plugins.load(arguments.plugin)
    require_device(arguments.device)
    use_compilation_cache(None)


def input_lines(
    input_file: str | None, doing: str, replace: bool = False
) -> tuple[Iterator[str], str]:
    """Return the lines of a file or of standard input, and what messages call them."""
    name = input_file or "-"
    if name == "-" and sys.stdin.isatty():
        print(f"{doing} what you type; end with Ctrl-D", file=sys.stderr)
    shown = "<stdin>" if name == "-" else name
    return read_lines(open_input(name), shown, replace), shown


def add_fill_mask(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq fill-mask``."""
    parser.add_argument("model", metavar="DIR", help="directory or Hub name of a masked LM")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help=f"text with {MASK} where a token is to be guessed"
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="guesses a mask (5)")
    add_json(parser)


def run_fill_mask(arguments: argparse.Namespace) -> int:
    """Print the likeliest tokens for each mask of each text."""
    check_at_least_one(arguments, "top")
    plugins.load(arguments.plugin)
    from hfseq.pipelines.base import RejectedInput
    from hfseq.pipelines.tasks import pipeline

    made = pipeline("fill-mask", arguments.model, batch_size=32, top_k=arguments.top)
    if made.tokenizer.mask_token_id is None:
        raise UsageError(
            f"the tokenizer of {arguments.model} has no mask token: take a masked language model"
        )
    bare = [text for text in arguments.texts if MASK not in text]
    if bare:
        raise UsageError(f"no {MASK} in '{bare[0]}': put one where a token is to be guessed")
    texts = [text.replace(MASK, made.tokenizer.mask_token) for text in arguments.texts]
    filled = []
    for text, masks in zip(arguments.texts, made.stream(texts), strict=True):
        if isinstance(masks, RejectedInput):
            raise UsageError(f"'{text}': {masks}")
        filled.append(masks if isinstance(masks[0], list) else [masks])
    if arguments.json:
        rows = [
            {
                "text": text,
                "masks": [
                    [
                        {"token": guess["token_str"].strip(), "probability": guess["score"]}
                        for guess in guesses
                    ]
                    for guesses in masks
                ],
            }
            for text, masks in zip(arguments.texts, filled, strict=True)
        ]
        print_json(rows, texts=True)
        return 0
    for text, masks in zip(arguments.texts, filled, strict=True):
        print(text)
        for number, guesses in enumerate(masks, 1):
            if len(masks) > 1:
                print(f"  mask {number}")
            for guess in guesses:
                print(f"  {guess['score']:6.1%}  {guess['token_str'].strip()}")
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those of the search have the names of ``transformers.GenerationConfig``."""
    parser.add_argument("model", metavar="DIR", help="directory or Hub name of a language model")
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="what to continue, or the encoder's input"
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file",
        metavar="FILE",
        help="a prompt a line; - is standard input, the default where there is no PROMPT",
    )
    group.add_argument("--whole", action="store_true", help="all of the input is one prompt")
    add_json(group, "a JSON object a line, one a prompt")
    group.add_argument(
        "--continuation_only", action="store_true", help="print what is new, not the prompt"
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print tokens as they come; default: on a terminal, for one prompt without beams",
    )
    group = parser.add_argument_group("search")
    group.add_argument("--do_sample", action="store_true", help="draw tokens at random")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (0)")
    for name, kind, text in OPTIONS:
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    add_model_flags(parser.add_argument_group("model"))


def run_generate(arguments: argparse.Namespace) -> int:
    """Write for each prompt."""
    given = {name: getattr(arguments, name) for name, _, _ in OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    if arguments.do_sample:
        options |= {"do_sample": True, "prng_key": arguments.seed}
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
    prompts = list(arguments.prompts)
    if not prompts:
        lines, name = input_lines(arguments.input_file, "continuing")
        for number, line in enumerate(lines, 1):
            if problem := getattr(line, "problem", None):
                raise UsageError(f"{name}:{number}: {problem}")
            prompts.append(str(line))
        if arguments.whole and prompts:
            prompts = ["\n".join(prompts)]
        else:
            prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError("no prompt: the input is empty")
    from hfseq.pipelines.text_generation import TextGenerator

    prepare_devices(arguments)
    generator = TextGenerator.from_pretrained(arguments.model, arguments.precision)
    show_prompt = generator.is_decoder_only and not arguments.continuation_only
    plain = options.get("num_beams", 1) == 1 == options.get("num_return_sequences", 1)
    possible = len(prompts) == 1 and plain and not arguments.json
    if arguments.stream and not possible:
        raise UsageError("--stream needs one prompt, one sequence, no beams and no --json")
    if possible and (arguments.stream or arguments.stream is None and sys.stdout.isatty()):
        if show_prompt:
            print(colorize(prompts[0], "faint"), end="", flush=True)
        for piece in generator.stream(prompts[0], **options):
            print(piece, end="", flush=True)
        print()
        return 0
    for number, prompt in enumerate(prompts, 1):
        texts = generator.generate(prompt, **options)
        if arguments.json:
            rows = [{"text": one.text, "tokens": one.tokens, "ended": one.ended} for one in texts]
            print_json({"prompt": prompt, "sequences": rows}, one_line=True, texts=True)
            continue
        for which, one in enumerate(texts, 1):
            if len(prompts) * len(texts) > 1:
                of = f"{number}" + (f".{which}" if len(texts) > 1 else "")
                print(colorize(f"== {of} ==", "faint"))
            print((prompt if show_prompt else "") + one.text, flush=True)
    return 0


def add_transcribe(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq transcribe``."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a Whisper")
    parser.add_argument("files", metavar="FILE", nargs="+", help="a file of sound, or a folder")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output_format",
        choices=("txt", "srt", "json"),
        default="txt",
        help="text, subtitles, or segments with their times (txt)",
    )
    group.add_argument(
        "--output_dir",
        metavar="DIR",
        help="a file for each there, FILE.txt and so on; default: standard output",
    )
    add_json(group, "a JSON object a line on standard output, for each file")
    add_progress(group)
    group = parser.add_argument_group("speech")
    group.add_argument("--language", metavar="NAME", help="de or german; default: it is heard")
    group.add_argument(
        "--task", choices=("transcribe", "translate"), help="translate writes English"
    )
    group.add_argument(
        "--wrong_rate",
        choices=("convert", "report"),
        default="convert",
        help="a file of another rate than the model's: convert it, or report it (convert)",
    )
    add_int_flags(
        group,
        ("batch_size", 8, "files read together (8)"),
        ("num_beams", 1, "1 is greedy search (1)"),
        ("max_new_tokens", None, "longest text of thirty seconds; default: what fits"),
    )
    add_model_flags(parser.add_argument_group("model"))


def run_transcribe(arguments: argparse.Namespace) -> int:
    """Transcribe files and folders, and return 1 if one could not be."""
    from tqdm import tqdm

    from hfseq.data.audio import AudioFile, UnreadableError, find_audio
    from hfseq.pipelines.transcription import Transcriber

    names, seconds = find_audio(arguments.files), 0.0
    for name in names:
        with contextlib.suppress(UnreadableError):  # told where it is read
            seconds += AudioFile(name).seconds
    folder = Path(arguments.output_dir) if arguments.output_dir else None
    targets = _transcript_files(names, folder, arguments.output_format)
    prepare_devices(arguments)
    options = ("precision", "language", "task", "batch_size", "num_beams", "max_new_tokens")
    transcriber = Transcriber.from_pretrained(
        arguments.model,
        resample=arguments.wrong_rate == "convert",
        **{name: getattr(arguments, name) for name in options},
    )
    hidden, bad = arguments.no_progress or not sys.stderr.isatty(), 0
    form = "{l_bar}{bar}| {n:.0f}/{total:.0f} s of sound [{elapsed}<{remaining}]"
    with tqdm(total=seconds, bar_format=form, disable=hidden, file=sys.stderr) as bar:
        for name, one in zip(names, transcriber(names, progress=bar.update), strict=True):
            if one.error:
                bad += 1
                bar.write(f"error: {one.name}: {one.error}", file=sys.stderr)
            if arguments.json:
                print_json(one.record(), one_line=True, texts=True)
            if one.error:
                continue
            text = {
                "txt": lambda one=one: one.text + "\n",
                "srt": lambda one=one: one.to_srt(),
                "json": lambda one=one: json.dumps(one.record(), ensure_ascii=False) + "\n",
            }[arguments.output_format]()
            if folder is not None:
                write_atomically(targets[name], text)
            elif not arguments.json:
                print(text, end="", flush=True)
    if bad:
        print(f"{bad} of {len(names)} files could not be transcribed", file=sys.stderr)
    return 1 if bad else 0


def add_caption(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq caption``."""
    parser.add_argument(
        "model", metavar="MODEL", help="directory or Hub name of a vision-encoder-decoder"
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="a picture, or a folder of them")
    group = parser.add_argument_group("pictures")
    add_int_flags(group, ("batch_size", 8, "pictures read together (8)"))
    add_int_flags(group, ("decode_workers", 0, "processes that decode pictures; 0: this one (0)"))
    group = parser.add_argument_group("output")
    add_json(group, "a JSON object a line, for each picture")
    add_progress(group)
    group = parser.add_argument_group("caption")
    add_int_flags(group, ("num_beams", None, "1 is greedy search; default: the model's own"))
    add_int_flags(group, ("max_new_tokens", None, "longest caption; default: the model's own"))
    add_model_flags(parser.add_argument_group("model"))


def run_caption(arguments: argparse.Namespace) -> int:
    """Write a caption for each picture."""
    return _on_pictures(arguments, "Captioner", ("num_beams", "max_new_tokens"))


def classify_images(arguments: argparse.Namespace) -> int:
    """Say which classes each picture has; ``inputs`` are files and folders."""
    unused = ("input_file", "output_file", "candidate_labels")
    if not arguments.inputs or any(getattr(arguments, name) for name in unused):
        raise UsageError(
            "the model reads pictures: give files or folders, and neither --input_file nor "
            "--output_file nor --candidate_labels"
        )
    arguments.files = arguments.inputs
    return _on_pictures(arguments, "PictureClassifier", ("top_k",))


def _on_pictures(arguments: argparse.Namespace, kind: str, names: Sequence[str]) -> int:
    """Print an answer to each picture, and return 1 if one could not be read."""
    from tqdm import tqdm

    from hfseq.data.images import find_images

    found, bad = find_images(arguments.files), 0
    prepare_devices(arguments)
    from hfseq.pipelines import images

    pipeline = getattr(images, kind).from_pretrained(
        arguments.model,
        workers=arguments.decode_workers,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
        **{name: getattr(arguments, name) for name in names},
    )
    hidden = arguments.no_progress or not sys.stderr.isatty() or len(found) == 1
    for one in tqdm(pipeline(found), total=len(found), disable=hidden, unit=" pictures"):
        if one.error:
            bad += 1
            tqdm.write(f"error: {one.name}: {one.error}", file=sys.stderr)
        if arguments.json:
            print_json(one.record(), one_line=True, texts=True)
        elif not one.error:
            told = f"{one.name}\t" if len(found) > 1 else ""
            shown = one.text or ", ".join(f"{label} ({p:.1%})" for label, p in one.labels)
            print(f"{told}{shown}", flush=True)
    if bad:
        print(f"{bad} of {len(found)} pictures could not be read", file=sys.stderr)
    return 1 if bad else 0


def _transcript_files(names: Sequence[str], folder: Path | None, ending: str) -> dict[str, Path]:
    """Return where the transcript of each file goes; two files must not go to one place."""
    if folder is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    stems = Counter(Path(name).stem for name in names)
    return {
        name: folder / f"{path.stem if stems[path.stem] == 1 else name.replace('/', '_')}.{ending}"
        for name in names
        if (path := Path(name))
    }


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
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Let TEXT come after flags too: argparse gives up on ``*`` at the first flag."""
        parsed, rest = parse(args, namespace)
        if not any(word.startswith("-") for word in rest):
            parsed.texts, rest = [*parsed.texts, *rest], []
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]

    group = parser.add_argument_group("input and output")
    group.add_argument("--input_file", metavar="FILE", help="a text a line; - is standard input")
    add_output_file(group)
    add_json(group, "a JSON object a line, with all of it")
    group.add_argument("--scores", action="store_true", help="score and tab before each text")
    group.add_argument(
        "--long_lines",
        choices=LONG_LINE_POLICIES,
        default="truncate",
        help="a text that is longer than the model reads: truncate it, split it at sentences and "
        "translate all of it, or count it as an error (truncate)",
    )
    group.add_argument(
        "--on_bad_line",
        choices=("report", "skip", "replace", "stop"),
        default="report",
        help="a line that cannot be translated: report gives an empty line and exit code 1 at the "
        "end, skip the same with 0, replace translates invalid UTF-8 with U+FFFD in the place of "
        "wrong bytes, stop ends there (report)",
    )
    add_progress(group)

    group = parser.add_argument_group("search")
    add_int_flags(
        group,
        ("num_beams", 4, "1 is greedy search (4)"),
        ("num_return_sequences", 1, "best translations of each text (1)"),
        ("batch_size", 32, "texts translated together (32)"),
        ("max_source_length", None, "tokens; default: what the model reads"),
        ("max_new_tokens", None, "longest translation; default: twice the source and more"),
    )
    group.add_argument(
        "--length_penalty", type=float, metavar="X", help="above 0 favours long translations"
    )
    group.add_argument(
        "--length_penalty_type",
        choices=("transformers", "gnmt"),
        help="divide by length**X, or by ((5+length)/6)**X as GNMT does (transformers)",
    )

    group = parser.add_argument_group("model")
    group.add_argument("--source_lang", metavar="CODE", help="where the model has several")
    group.add_argument("--target_lang", metavar="CODE", help="where the model has several")
    group.add_argument("--source_prefix", metavar="TEXT", help="put this before each text")
    add_model_flags(group)


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
    problems = []
    if arguments.texts and arguments.input_file:
        problems.append("give TEXT or --input_file, not both")
    if arguments.scores and arguments.num_beams == 1:
        problems.append("--scores needs --num_beams above 1: greedy search has no scores")
    if problems:
        raise UsageError("; ".join(problems))
    lines: Iterable[str]
    total: int | None
    if arguments.texts:
        lines = [line for text in arguments.texts for line in text.split("\n")]
        name, total = "text", len(lines)
    else:
        total = count_lines(arguments.input_file or "-")
        replace = arguments.on_bad_line == "replace"
        lines, name = input_lines(arguments.input_file, "translating", replace)
    from tqdm import tqdm

    from hfseq.pipelines.translation import Translator

    given = {option: getattr(arguments, option) for option in TRANSLATOR_OPTIONS}
    pause = {} if total is None else {"pause": None}  # all of a file is there
    hidden = arguments.no_progress or not sys.stderr.isatty()
    bad = unended = count = 0
    with Output(arguments.output_file) as output:
        prepare_devices(arguments)
        translator = Translator.from_pretrained(arguments.model, **given)
        with tqdm(total=total, unit=" lines", disable=hidden, file=sys.stderr) as bar:
            for translation in translator.stream(lines, **pause):
                place = f"{name}:{translation.line}"
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
    if bad:
        text = f"{bad} of {count} lines could not be translated: their places are empty"
        print(text, file=sys.stderr)
    if unended:
        text = f"{unended} of {count} translations reached the limit of new tokens without an end"
        print(f"{text} (--max_new_tokens raises it)", file=sys.stderr)
    return 1 if bad and arguments.on_bad_line != "skip" else 0


def _render(translation: Translation, arguments: argparse.Namespace) -> str:
    """Return the output of a line: one line for each hypothesis, or a JSON object."""
    hypotheses = translation.hypotheses
    if arguments.json:
        record: dict[str, Any] = {
            "line": translation.line,
            "source": str(translation.source),
            "translations": [one._asdict() for one in hypotheses],
            "warnings": translation.warnings,
        }
        if translation.error:
            record["error"] = translation.error
        return json.dumps(record, ensure_ascii=False)
    texts = [one.text for one in hypotheses]
    if arguments.scores:
        texts = [
            f"{'' if one.score is None else format(one.score, '.4f')}\t{one.text}"
            for one in hypotheses
        ]
    # As many lines for each text, so that line numbers can be counted on.
    return "\n".join(texts or [""] * arguments.num_return_sequences)
