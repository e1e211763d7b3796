"""Command-line interface of ``hfseq fill-mask``, ``generate``, ``translate``, ``transcribe`` and
``caption``.

``scripts/translate.py`` uses the code of ``translate``. Modules that are slow to import are
imported inside functions so that ``--help`` is fast.
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
from hfseq.cli.text import add_hidden_alias, add_json, colorize, print_json
from hfseq.errors import DataError, UsageError, run_command, write_atomically
from hfseq.pipelines.lines import LONG_LINE_POLICIES, Output, count_lines, open_input, read_lines

if TYPE_CHECKING:
    from hfseq.pipelines.translation import Translation

EXAMPLES = """hfseq generate my-gpt2 "Once upon a time"
hfseq generate my-gpt2 "The law" --do_sample --temperature 0.8 --top_p 0.95 --seed 7
hfseq generate my-t5 --input_file questions.txt --num_beams 4 --json > answers.jsonl
cat chapter.txt | hfseq generate my-gpt2 --whole_input --max_new_tokens 200"""

#: Placeholder for a mask, which is replaced by the mask token of the tokenizer.
MASK = "<mask>"

#: Flags for fields of GenerationConfig: name, type, help.
OPTIONS: tuple[tuple[str, type, str], ...] = (
    (
        "max_new_tokens",
        int,
        "Maximum number of new tokens. Default: the model's max_length, or 64.",
    ),
    ("min_new_tokens", int, "Minimum number of new tokens."),
    ("num_beams", int, "Number of beams; 1 decodes greedily or samples."),
    ("num_return_sequences", int, "Number of samples, or of best beams, per prompt."),
    ("temperature", float, "Sampling temperature; values below 1 favor likely tokens."),
    ("top_k", int, "Sample from the k most likely tokens; 0 for all tokens."),
    ("top_p", float, "Sample from the most likely tokens with this total probability."),
    ("min_p", float, "Minimum probability of a sampled token relative to the most likely token."),
    ("typical_p", float, "Probability mass of locally typical sampling."),
    ("repetition_penalty", float, "Penalty for repeated tokens; 1 is no penalty."),
    ("no_repeat_ngram_size", int, "Size of n-grams that may occur only once."),
    ("length_penalty", float, "Length penalty of beam search; values above 0 favor long texts."),
)

#: Options that have no effect without sampling.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")

#: Flags that are passed to `Translator` under the same names.
TRANSLATOR_OPTIONS = (
    *("num_beams", "num_return_sequences", "batch_size", "max_source_length", "long_lines"),
    *("max_new_tokens", "length_penalty", "length_penalty_type", "precision"),
    *("source_lang", "target_lang", "source_prefix"),
)


def add_model_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags of all commands that run a model."""
    group.add_argument(
        "--precision",
        metavar="NAME",
        default="float32",
        help="Precision, such as float32 or bfloat16. Default: float32.",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda", "gpu", "tpu"),
        help="Fail unless this type of device is available. Default: any device.",
    )


def add_int_flags(group: argparse._ActionsContainer, *flags: tuple[str, int | None, str]) -> None:
    """Adds integer flags. Each has a name, a default and a help text."""
    for name, default, text in flags:
        group.add_argument(f"--{name}", type=int, metavar="N", default=default, help=text)


def add_progress(group: argparse._ActionsContainer) -> None:
    """Adds ``--no_progress``."""
    group.add_argument("--no_progress", action="store_true", help="Do not show a progress bar.")


def add_output_file(group: argparse._ActionsContainer) -> None:
    """Adds ``--output_file`` for output by line."""
    group.add_argument(
        "--output_file",
        metavar="FILE",
        help="Output file, named FILE.part until it is complete. Default: standard output.",
    )


def check_at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Raises `UsageError` if a numeric flag is below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} must be at least 1")


def prepare_devices(arguments: argparse.Namespace) -> None:
    """Loads the plugins, checks ``--device`` and enables the compilation cache."""
    from hfseq.training.output_directory import require_device, use_compilation_cache

    plugins.load(arguments.plugin)
    require_device(arguments.device)
    use_compilation_cache(None)


def input_lines(
    input_file: str | None, doing: str, replace: bool = False
) -> tuple[Iterator[str], str]:
    """Opens the input of a command.

    Args:
        input_file: Path of the file, or ``-`` or `None` for standard input.
        doing: Verb for the message on a terminal, e.g. ``"translating"``.
        replace: Whether to replace invalid UTF-8 by U+FFFD.

    Returns:
        The lines, and the name of the input for messages.
    """
    name = input_file or "-"
    if name == "-" and sys.stdin.isatty():
        print(f"{doing} lines from the terminal; press Ctrl-D to finish", file=sys.stderr)
    display_name = "<stdin>" if name == "-" else name
    return read_lines(open_input(name), display_name, replace), display_name


def add_fill_mask(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq fill-mask``."""
    parser.add_argument("model", metavar="DIR", help="Directory or Hub name of a masked LM.")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help=f"Text with {MASK} for each token to predict."
    )
    top_k = parser.add_argument(
        "--top_k",
        type=int,
        default=5,
        metavar="N",
        help="Number of predictions per mask. Default: 5.",
    )
    add_hidden_alias(parser, "--top", top_k)
    add_json(parser)


def run_fill_mask(arguments: argparse.Namespace) -> int:
    """Prints the most likely tokens for each mask of each text."""
    check_at_least_one(arguments, "top_k")
    plugins.load(arguments.plugin)
    from hfseq.pipelines.base import RejectedInput
    from hfseq.pipelines.tasks import pipeline

    fill_mask = pipeline("fill-mask", arguments.model, batch_size=32, top_k=arguments.top_k)
    if fill_mask.tokenizer.mask_token_id is None:
        raise UsageError(
            f"the tokenizer of {arguments.model} has no mask token: use a masked language model"
        )
    unmasked = [text for text in arguments.texts if MASK not in text]
    if unmasked:
        raise UsageError(f"no {MASK} in '{unmasked[0]}': insert {MASK} for each token to predict")
    texts = [text.replace(MASK, fill_mask.tokenizer.mask_token) for text in arguments.texts]
    predictions = []
    for text, masks in zip(arguments.texts, fill_mask.stream(texts), strict=True):
        if isinstance(masks, RejectedInput):
            raise UsageError(f"'{text}': {masks}")
        predictions.append(masks if isinstance(masks[0], list) else [masks])
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
            for text, masks in zip(arguments.texts, predictions, strict=True)
        ]
        print_json(rows, texts=True)
        return 0
    for text, masks in zip(arguments.texts, predictions, strict=True):
        print(text)
        for number, guesses in enumerate(masks, 1):
            if len(masks) > 1:
                print(f"  mask {number}")
            for guess in guesses:
                print(f"  {guess['score']:6.1%}  {guess['token_str'].strip()}")
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq generate``. Search flags are fields of ``GenerationConfig``."""
    parser.add_argument("model", metavar="DIR", help="Directory or Hub name of a language model.")
    parser.add_argument(
        "prompts",
        metavar="PROMPT",
        nargs="*",
        help="Prompt, or input of the encoder. Default: standard input.",
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file",
        metavar="FILE",
        help="File with one prompt per line. Default: standard input (-) if there is no PROMPT.",
    )
    whole_input = group.add_argument(
        "--whole_input", action="store_true", help="Use the whole input as one prompt."
    )
    add_hidden_alias(group, "--whole", whole_input)
    add_json(group, "Print a JSON object per prompt, each on one line.")
    group.add_argument("--continuation_only", action="store_true", help="Do not print the prompt.")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Print tokens while they are generated. Default: on a terminal, for a single prompt "
        "without beams.",
    )
    group = parser.add_argument_group(
        "search", "Defaults are those of the model's generation_config.json unless stated."
    )
    group.add_argument("--do_sample", action="store_true", help="Sample tokens.")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of sampling. Default: 0."
    )
    for name, value_type, text in OPTIONS:
        metavar = "N" if value_type is int else "X"
        group.add_argument(f"--{name}", type=value_type, metavar=metavar, help=text)
    add_model_flags(parser.add_argument_group("model"))


def run_generate(arguments: argparse.Namespace) -> int:
    """Generates text for each prompt."""
    values = {name: getattr(arguments, name) for name, _, _ in OPTIONS}
    options = {name: value for name, value in values.items() if value is not None}
    if arguments.do_sample:
        options |= {"do_sample": True, "prng_key": arguments.seed}
    problems = []
    if arguments.prompts and (arguments.input_file or arguments.whole_input):
        problems.append("use either PROMPT, or --input_file and --whole_input")
    unused = [name for name in SAMPLING if name in options] if not arguments.do_sample else []
    if unused:
        problems.append(f"--{unused[0]} requires --do_sample: it only affects sampling")
    count = options.get("num_return_sequences", 1)
    if count > max(1, options.get("num_beams", 1)) and not arguments.do_sample:
        problems.append(
            f"--num_return_sequences {count} requires --do_sample, or --num_beams of at least "
            f"{count}: greedy search generates one text"
        )
    problems += [
        f"--{name} {options[name]} must be at least 1"
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
        if arguments.whole_input and prompts:
            prompts = ["\n".join(prompts)]
        else:
            prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError("no prompt: the input is empty")
    from hfseq.pipelines.text_generation import TextGenerator

    prepare_devices(arguments)
    generator = TextGenerator.from_pretrained(arguments.model, arguments.precision)
    show_prompt = generator.is_decoder_only and not arguments.continuation_only
    single_sequence = options.get("num_beams", 1) == 1 == options.get("num_return_sequences", 1)
    can_stream = len(prompts) == 1 and single_sequence and not arguments.json
    if arguments.stream and not can_stream:
        raise UsageError("--stream requires one prompt, one sequence, no beams and no --json")
    if can_stream and (arguments.stream or arguments.stream is None and sys.stdout.isatty()):
        if show_prompt:
            print(colorize(prompts[0], "faint"), end="", flush=True)
        for piece in generator.stream(prompts[0], **options):
            print(piece, end="", flush=True)
        print()
        return 0
    for number, prompt in enumerate(prompts, 1):
        texts = generator.generate(prompt, **options)
        if arguments.json:
            rows = [
                {"text": sequence.text, "tokens": sequence.tokens, "ended": sequence.ended}
                for sequence in texts
            ]
            print_json({"prompt": prompt, "sequences": rows}, one_line=True, texts=True)
            continue
        for index, sequence in enumerate(texts, 1):
            if len(prompts) * len(texts) > 1:
                label = f"{number}" + (f".{index}" if len(texts) > 1 else "")
                print(colorize(f"== {label} ==", "faint"))
            print((prompt if show_prompt else "") + sequence.text, flush=True)
    return 0


def add_transcribe(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq transcribe``."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of a Whisper model.")
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="Audio file, or directory with audio files."
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output_format",
        choices=("txt", "srt", "json"),
        default="txt",
        help="Plain text, subtitles, or segments with timestamps. Default: txt.",
    )
    group.add_argument(
        "--output_dir",
        metavar="DIR",
        help="Directory for one output file per input file. Default: standard output.",
    )
    add_json(group, "Print a JSON object per file, each on one line.")
    add_progress(group)
    group = parser.add_argument_group("speech")
    group.add_argument(
        "--language", metavar="NAME", help="Language, e.g. de or german. Default: detected."
    )
    group.add_argument(
        "--task",
        choices=("transcribe", "translate"),
        help="Transcribe, or translate to English. Default: the model's task, usually transcribe.",
    )
    on_rate_mismatch = group.add_argument(
        "--on_rate_mismatch",
        choices=("convert", "report"),
        default="convert",
        help="Resample files with another sampling rate, or report them as errors. Default: "
        "convert.",
    )
    add_hidden_alias(group, "--wrong_rate", on_rate_mismatch)
    add_int_flags(
        group,
        ("batch_size", 8, "Number of files per batch. Default: 8."),
        ("num_beams", 1, "Number of beams; 1 decodes greedily. Default: 1."),
        ("max_new_tokens", None, "Maximum tokens per 30 seconds. Default: the model's limit."),
    )
    add_model_flags(parser.add_argument_group("model"))


def run_transcribe(arguments: argparse.Namespace) -> int:
    """Transcribes files and directories. Returns 1 if a file cannot be transcribed."""
    from tqdm import tqdm

    from hfseq.data.audio import AudioFile, UnreadableError, find_audio
    from hfseq.pipelines.transcription import Transcriber

    names, seconds = find_audio(arguments.files), 0.0
    for name in names:
        with contextlib.suppress(UnreadableError):  # the transcriber reports it
            seconds += AudioFile(name).seconds
    folder = Path(arguments.output_dir) if arguments.output_dir else None
    targets = _transcript_files(names, folder, arguments.output_format)
    prepare_devices(arguments)
    options = ("precision", "language", "task", "batch_size", "num_beams", "max_new_tokens")
    transcriber = Transcriber.from_pretrained(
        arguments.model,
        resample=arguments.on_rate_mismatch == "convert",
        **{name: getattr(arguments, name) for name in options},
    )
    hidden, failures = arguments.no_progress or not sys.stderr.isatty(), 0
    bar_format = "{l_bar}{bar}| {n:.0f}/{total:.0f} s of audio [{elapsed}<{remaining}]"
    with tqdm(total=seconds, bar_format=bar_format, disable=hidden, file=sys.stderr) as bar:
        for name, transcript in zip(names, transcriber(names, progress=bar.update), strict=True):
            if transcript.error:
                failures += 1
                bar.write(f"error: {transcript.name}: {transcript.error}", file=sys.stderr)
            if arguments.json:
                print_json(transcript.to_dict(), one_line=True, texts=True)
            if transcript.error:
                continue
            text = {
                "txt": lambda transcript=transcript: transcript.text + "\n",
                "srt": lambda transcript=transcript: transcript.to_srt(),
                "json": lambda transcript=transcript: (
                    json.dumps(transcript.to_dict(), ensure_ascii=False) + "\n"
                ),
            }[arguments.output_format]()
            if folder is not None:
                write_atomically(targets[name], text)
            elif not arguments.json:
                print(text, end="", flush=True)
    if failures:
        print(f"{failures} of {len(names)} files could not be transcribed", file=sys.stderr)
    return 1 if failures else 0


def add_caption(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq caption``."""
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or Hub name of a vision encoder-decoder."
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="Image file, or directory with images."
    )
    group = parser.add_argument_group("images")
    add_int_flags(
        group,
        ("batch_size", 8, "Number of images per batch. Default: 8."),
        ("decode_workers", 0, "Processes that decode images; 0 uses the main process. Default: 0."),
    )
    group = parser.add_argument_group("output")
    add_json(group, "Print a JSON object per image, each on one line.")
    add_progress(group)
    group = parser.add_argument_group("caption")
    add_int_flags(
        group,
        ("num_beams", None, "Number of beams; 1 decodes greedily. Default: the model's."),
        ("max_new_tokens", None, "Maximum caption length in tokens. Default: the model's."),
    )
    add_model_flags(parser.add_argument_group("model"))


def run_caption(arguments: argparse.Namespace) -> int:
    """Generates a caption for each image."""
    return _process_images(arguments, "Captioner", ("num_beams", "max_new_tokens"))


def classify_images(arguments: argparse.Namespace) -> int:
    """Classifies the images in ``arguments.inputs``, which are files and directories."""
    unused = ("input_file", "output_file", "candidate_labels")
    if not arguments.inputs or any(getattr(arguments, name) for name in unused):
        raise UsageError(
            "the model classifies images: pass image files or directories as arguments, and remove "
            "--input_file, --output_file and --candidate_labels"
        )
    arguments.files = arguments.inputs
    return _process_images(arguments, "ImageClassifier", ("top_k",))


def _process_images(arguments: argparse.Namespace, pipeline_name: str, names: Sequence[str]) -> int:
    """Prints the pipeline's result for each image. Returns 1 if an image cannot be read.

    Args:
        arguments: The flags of the command.
        pipeline_name: Class in `hfseq.pipelines.images`.
        names: Flags that are passed to the class.
    """
    from tqdm import tqdm

    from hfseq.data.images import find_images

    paths, failures = find_images(arguments.files), 0
    prepare_devices(arguments)
    from hfseq.pipelines import images

    pipeline = getattr(images, pipeline_name).from_pretrained(
        arguments.model,
        workers=arguments.decode_workers,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
        **{name: getattr(arguments, name) for name in names},
    )
    hidden = arguments.no_progress or not sys.stderr.isatty() or len(paths) == 1
    for result in tqdm(pipeline(paths), total=len(paths), disable=hidden, unit=" images"):
        if result.error:
            failures += 1
            tqdm.write(f"error: {result.name}: {result.error}", file=sys.stderr)
        if arguments.json:
            print_json(result.to_dict(), one_line=True, texts=True)
        elif not result.error:
            prefix = f"{result.name}\t" if len(paths) > 1 else ""
            answer = result.text or ", ".join(f"{label} ({p:.1%})" for label, p in result.labels)
            print(f"{prefix}{answer}", flush=True)
    if failures:
        print(f"{failures} of {len(paths)} images could not be read", file=sys.stderr)
    return 1 if failures else 0


def _transcript_files(names: Sequence[str], folder: Path | None, ending: str) -> dict[str, Path]:
    """Returns the output path for each audio file. Equal stems get distinct paths."""
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
    """Adds the flags of ``hfseq translate``.

    Args:
        parser: The parser of the command.
        aliases: Whether to add the aliases of translate-ai's script. The model is then the first
            positional argument, unless ``--checkpoint-file`` gives it.
    """
    text = "Text to translate. Default: standard input."
    if aliases:
        text = "MODEL, a directory or Hub name, and texts to translate. Default: standard input."
        parser.add_argument("--checkpoint-file", metavar="MODEL", help="Alias of MODEL.")
        parser.add_argument("--english-query", metavar="TEXT", help="Alias of TEXT.")
    else:
        parser.add_argument(
            "model", metavar="MODEL", help="Directory or Hub name of an encoder-decoder."
        )
    parser.add_argument("texts", metavar="TEXT", nargs="*", help=text)
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Allows TEXT after flags too: argparse ends a ``*`` argument at the first flag."""
        parsed, unparsed = parse(args, namespace)
        if not any(word.startswith("-") for word in unparsed):
            parsed.texts, unparsed = [*parsed.texts, *unparsed], []
        return parsed, unparsed

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]

    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input_file",
        metavar="FILE",
        help="File with one text per line. Default: standard input (-).",
    )
    add_output_file(group)
    add_json(group, "Print a JSON object per line with all results.")
    group.add_argument(
        "--scores", action="store_true", help="Print the score and a tab before each translation."
    )
    group.add_argument(
        "--long_lines",
        choices=LONG_LINE_POLICIES,
        default="truncate",
        help="Truncate texts that exceed the model's maximum length, split them at sentences and "
        "translate everything, or treat them as errors. Default: truncate.",
    )
    group.add_argument(
        "--on_bad_line",
        choices=("report", "skip", "replace", "stop"),
        default="report",
        help="Write an empty line for a line that cannot be translated and exit with code 1 "
        "(report) or 0 (skip), replace invalid UTF-8 by U+FFFD (replace), or stop. Default: "
        "report.",
    )
    add_progress(group)

    group = parser.add_argument_group("search")
    add_int_flags(
        group,
        ("num_beams", 4, "Number of beams; 1 decodes greedily. Default: 4."),
        ("num_return_sequences", 1, "Number of translations per text. Default: 1."),
        ("batch_size", 32, "Number of texts per batch. Default: 32."),
        ("max_source_length", None, "Maximum source length in tokens. Default: the model's."),
        ("max_new_tokens", None, "Maximum translation length. Default: over twice the source."),
    )
    group.add_argument(
        "--length_penalty",
        type=float,
        metavar="X",
        help="Length penalty of beam search; values above 0 favor long translations. Default: the "
        "model's.",
    )
    group.add_argument(
        "--length_penalty_type",
        choices=("transformers", "gnmt"),
        help="Divide scores by length**X (transformers) or ((5+length)/6)**X (gnmt). Default: "
        "transformers.",
    )

    group = parser.add_argument_group("model")
    group.add_argument(
        "--source_lang", metavar="CODE", help="Source language, for multilingual models."
    )
    group.add_argument(
        "--target_lang", metavar="CODE", help="Target language, for multilingual models."
    )
    group.add_argument(
        "--source_prefix", metavar="TEXT", help="Prefix for each text. Default: none."
    )
    add_model_flags(group)


def main(argv: Sequence[str] | None = None, description: str | None = None) -> int:
    """Runs ``scripts/translate.py`` and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(
        lambda: run_translate(script_arguments(words, description)), debug="--debug" in words
    )


def script_arguments(argv: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """Parses the flags of ``scripts/translate.py``, some of which have aliases."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_translate(parser, aliases=True)
    parser.add_argument(
        "--plugin", action="append", metavar="FILE", default=[], help="Plugin file to load."
    )
    parser.add_argument("--debug", action="store_true", help="Show the tracebacks of errors.")
    arguments = parser.parse_args(argv)
    words = list(arguments.texts)
    if arguments.checkpoint_file is not None:
        words.insert(0, arguments.checkpoint_file)
    if arguments.english_query is not None:
        words.append(arguments.english_query)
    if not words:
        raise UsageError("no model: the first argument must be a directory or a Hub name")
    arguments.model, arguments.texts = words[0], words[1:]
    return arguments


def run_translate(arguments: argparse.Namespace) -> int:
    """Translates the texts. Returns 1 if a line cannot be translated."""
    problems = []
    if arguments.texts and arguments.input_file:
        problems.append("use either TEXT or --input_file")
    if arguments.scores and arguments.num_beams == 1:
        problems.append("--scores requires --num_beams above 1: greedy search has no scores")
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

    options = {option: getattr(arguments, option) for option in TRANSLATOR_OPTIONS}
    pause = {} if total is None else {"pause": None}  # a file has no pauses
    hidden = arguments.no_progress or not sys.stderr.isatty()
    failures = truncated = count = 0
    with Output(arguments.output_file) as output:
        prepare_devices(arguments)
        translator = Translator.from_pretrained(arguments.model, **options)
        with tqdm(total=total, unit=" lines", disable=hidden, file=sys.stderr) as bar:
            for translation in translator.stream(lines, **pause):
                location = f"{name}:{translation.line}"
                for warning in translation.warnings:
                    bar.write(f"warning: {location}: {warning}", file=sys.stderr)
                if translation.error:
                    bar.write(f"error: {location}: {translation.error}", file=sys.stderr)
                    if arguments.on_bad_line == "stop":
                        raise DataError(f"stopped at {location} (--on_bad_line stop)")
                output.write(_render(translation, arguments))
                bar.update()
                count += 1
                failures += translation.error is not None
                truncated += any(not hypothesis.ended for hypothesis in translation.hypotheses)
    if failures:
        text = f"{failures} of {count} lines could not be translated and are empty in the output"
        print(text, file=sys.stderr)
    if truncated:
        text = (
            f"{truncated} of {count} translations reached the maximum length and may be truncated"
        )
        print(f"{text} (increase --max_new_tokens)", file=sys.stderr)
    return 1 if failures and arguments.on_bad_line != "skip" else 0


def _render(translation: Translation, arguments: argparse.Namespace) -> str:
    """Returns the output for an input line: one line per hypothesis, or a JSON object."""
    hypotheses = translation.hypotheses
    if arguments.json:
        record: dict[str, Any] = {
            "line": translation.line,
            "source": str(translation.source),
            "translations": [hypothesis._asdict() for hypothesis in hypotheses],
            "warnings": translation.warnings,
        }
        if translation.error:
            record["error"] = translation.error
        return json.dumps(record, ensure_ascii=False)
    texts = [hypothesis.text for hypothesis in hypotheses]
    if arguments.scores:
        texts = [
            ("" if hypothesis.score is None else format(hypothesis.score, ".4f"))
            + f"\t{hypothesis.text}"
            for hypothesis in hypotheses
        ]
    # The number of lines per text is constant, so that line numbers of input and output correspond.
    return "\n".join(texts or [""] * arguments.num_return_sequences)
