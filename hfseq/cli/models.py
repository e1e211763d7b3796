"""Command-line interface of ``hfseq fill-mask``, ``generate``, ``translate``, ``transcribe`` and
``caption``.

``scripts/translate.py`` uses the code of ``translate``. Modules that are slow to import are
imported inside functions so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.cli import flags
from hfseq.cli.text import add_hidden_alias, colorize
from hfseq.errors import (
    DataError,
    UsageError,
    first_line,
    parse_json,
    run_command,
    write_atomically,
)
from hfseq.pipelines.lines import (
    LONG_LINE_POLICIES,
    BadLine,
    Output,
    count_lines,
    one_line,
    open_input,
    read_lines,
)
from hfseq.training.flag_names import resolve_flags

if TYPE_CHECKING:
    from hfseq.pipelines.base import Answer

EXAMPLES = """hfseq generate my-gpt2 "Once upon a time"
hfseq generate my-gpt2 "The law" --do_sample --temperature 0.8 --top_p 0.95 --seed 7
hfseq generate my-t5 --input_file questions.txt --num_beams 4 --json > answers.jsonl
hfseq generate my-qwen "Who wrote this?" --chat --chat_template_kwargs '{"enable_thinking": false}'
cat chapter.txt | hfseq generate my-gpt2 --whole_input --max_new_tokens 200"""

#: Spelling of a mask that all models accept, for help texts.
MASK = "<mask>"

#: Options that have no effect without sampling.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")

#: Flags of ``hfseq translate`` that are options of ``generate`` or of the pipeline.
TRANSLATION_OPTIONS = (
    *("num_beams", "num_return_sequences", "max_source_length", "max_new_tokens"),
    *("length_penalty", "length_penalty_type", "source_prefix"),
)

#: Flags of ``hfseq transcribe`` for temperature fallback: arguments of ``add_argument`` and help.
FALLBACK_FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": (
        {"nargs": "+"},
        "Temperatures in the order in which they are tried. 0 is greedy search or beam search; "
        "other values select sampling.",
    ),
    "compression_ratio_threshold": (
        {},
        "Highest compression ratio of a window's tokens. Repeated tokens increase the ratio.",
    ),
    "logprob_threshold": ({}, "Lowest average log-probability of a window's tokens."),
    "no_speech_threshold": (
        {},
        "Skip windows whose probability of silence is higher and whose average log-probability is "
        "below --logprob_threshold.",
    ),
}

#: If no new line of a stream arrives for this many seconds, the lines so far are processed.
PAUSE = 0.1


def add_int_flags(group: argparse._ActionsContainer, *flags: tuple[str, int | None, str]) -> None:
    """Adds integer flags. Each has a name, a default and a help text."""
    for name, default, text in flags:
        group.add_argument(f"--{name}", type=int, metavar="N", default=default, help=text)


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
        doing: Verb for the message if the input is typed in a terminal, e.g. ``"translating"``.
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
        "texts",
        metavar="TEXT",
        nargs="+",
        help=f"Text with {MASK} or the model's mask token for each token to predict.",
    )
    flags.add_flag(parser, "top_k", 5, aliases=("--top",))
    flags.add_output_flags(parser.add_argument_group("output"), "Write a JSON list of all texts.")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=32)


def run_fill_mask(arguments: argparse.Namespace) -> int:
    """Prints the most likely tokens for each mask of each text."""
    prepare_devices(arguments)
    from tqdm import tqdm

    from hfseq.pipelines.factory import pipeline

    fill_mask = pipeline(
        "fill-mask",
        arguments.model,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
        top_k=arguments.top_k,
    )
    texts, predictions = arguments.texts, []
    hidden = arguments.disable_tqdm or not sys.stderr.isatty() or len(texts) == 1
    answers = tqdm(fill_mask.stream(texts), total=len(texts), disable=hidden, unit=" texts")
    for text, answer in zip(texts, answers, strict=True):
        if answer.error is not None:
            raise UsageError(f"'{text}': {answer.error}")
        masks = answer.output
        predictions.append(masks if isinstance(masks[0], list) else [masks])
    with Output(arguments.output_file) as output:
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
            output.write(json.dumps(rows, indent=2, ensure_ascii=False))
            return 0
        for text, masks in zip(arguments.texts, predictions, strict=True):
            output.write(text)
            for number, guesses in enumerate(masks, 1):
                if len(masks) > 1:
                    output.write(f"  mask {number}")
                for guess in guesses:
                    output.write(f"  {guess['score']:6.1%}  {guess['token_str'].strip()}")
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
    flags.add_flag(
        group,
        "input_file",
        help_text="File with one prompt per line; - is standard input.",
        default_text="standard input if there is no PROMPT",
    )
    whole_input = group.add_argument(
        "--whole_input", action="store_true", help="Use the whole input as one prompt."
    )
    add_hidden_alias(group, "--whole", whole_input)
    flags.add_output_flags(group, "Write a JSON object per prompt, each on one line.")
    group.add_argument("--continuation_only", action="store_true", help="Do not print the prompt.")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Print tokens while they are generated. Default: on a terminal, for a single prompt "
        "without beams.",
    )
    group = parser.add_argument_group("chat template")
    group.add_argument(
        "--chat",
        action="store_true",
        help="Format each prompt with the chat template, as a message of the user. In a .jsonl "
        "file, a prompt is a list of messages, or an object with messages, tools and "
        "chat_template_kwargs.",
    )
    flags.add_template_flags(group)
    group = parser.add_argument_group("search")
    group.add_argument("--do_sample", action="store_true", help="Sample tokens.")
    flags.add_flag(group, "seed")
    defaults = {
        "max_new_tokens": "the model's, or 256",
        "num_beams": "the model's, or 4 for an encoder-decoder",
    }
    for name in flags.GENERATION_FLAGS:
        flags.add_generation_flag(group, name, default_text=defaults.get(name, "the model's"))
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=1)


def run_generate(arguments: argparse.Namespace) -> int:
    """Generates text for each prompt."""
    values = {name: getattr(arguments, name) for name in flags.GENERATION_FLAGS}
    options = {name: value for name, value in values.items() if value is not None}
    if arguments.do_sample:
        options |= {"do_sample": True, "prng_key": arguments.seed}
    problems = []
    if arguments.prompts and (arguments.input_file or arguments.whole_input):
        problems.append("use either PROMPT, or --input_file and --whole_input, but not both")
    unused = [name for name in SAMPLING if name in options] if not arguments.do_sample else []
    if unused:
        problems.append(f"--{unused[0]} requires --do_sample, because it only affects sampling")
    count = options.get("num_return_sequences", 1)
    if count > max(1, options.get("num_beams", 1)) and not arguments.do_sample:
        problems.append(
            f"--num_return_sequences {count} requires --do_sample, or --num_beams of at least "
            f"{count}: greedy search generates one text"
        )
    template_flags = ("system", "chat_template", "chat_template_kwargs", "tools")
    unused = [name for name in template_flags if getattr(arguments, name) and not arguments.chat]
    if unused:
        problems.append(
            f"--{unused[0]} requires --chat, because the chat template is only used with --chat"
        )
    if problems:
        raise UsageError("; ".join(problems))
    options |= flags.template_options(arguments)
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
    inputs: list[Any] = prompts
    if arguments.chat:
        is_jsonl = str(arguments.input_file).endswith(".jsonl") and not arguments.whole_input
        inputs = [_parse_chat(prompt, arguments.system, is_jsonl) for prompt in prompts]
    with Output(arguments.output_file) as output:
        _generate(arguments, inputs, options, output)
    return 0


def _parse_chat(prompt: str, system: str | None, is_json: bool) -> dict[str, Any]:
    """Returns a dictionary with the messages of a prompt.

    Args:
        prompt: A message of the user, or JSON text.
        system: The system message, or `None`.
        is_json: Whether the prompt is JSON text: messages, or an object with messages.
    """
    chat: Any = {"messages": [{"role": "user", "content": prompt}]}
    if is_json:
        try:
            chat = parse_json(prompt)
        except ValueError as error:
            raise UsageError(f"the prompt {prompt:.60} is not valid JSON: {error}") from None
        chat = {"messages": chat} if isinstance(chat, list) else chat
        if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list):
            raise UsageError(f"the prompt {prompt:.60} contains no list of messages")
    if system is not None:
        chat["messages"] = [{"role": "system", "content": system}, *chat["messages"]]
    return chat


def _generate(
    arguments: argparse.Namespace, prompts: list[Any], options: dict[str, Any], output: Output
) -> None:
    """Writes the texts that continue or answer the prompts.

    Args:
        arguments: The flags of the command.
        prompts: The prompts, which are texts or dictionaries with messages.
        options: Options of generation.
        output: Where to write.
    """
    from tqdm import tqdm

    from hfseq.pipelines.factory import generation_task, pipeline

    to_stdout, count = output.name is None, options.get("num_return_sequences", 1)
    prepare_devices(arguments)
    task = generation_task(arguments.model)
    generator: Any = pipeline(task, arguments.model, precision=arguments.precision)
    is_causal = task == "text-generation"
    if arguments.chat and not is_causal:
        raise UsageError(
            f"--chat requires a causal model, but {arguments.model} is an encoder-decoder"
        )
    if (template := options.pop("chat_template", None)) is not None:
        generator.tokenizer.chat_template = template
    show_prompt = is_causal and not arguments.continuation_only and not arguments.chat
    is_single = options.get("num_beams", 1 if is_causal else 4) == 1 == count
    can_stream = len(prompts) == 1 and is_single and not arguments.json and to_stdout
    if arguments.stream and not can_stream:
        raise UsageError(
            "--stream requires one prompt, one sequence, no beams (--num_beams 1), and neither "
            "--json nor --output_file"
        )
    if can_stream and (arguments.stream or arguments.stream is None and sys.stdout.isatty()):
        if show_prompt:
            print(colorize(prompts[0], "faint"), end="", flush=True)
        for piece in generator.stream_text(prompts[0], **options):
            print(piece, end="", flush=True)
        print()
        return
    options |= {"return_details": True} | ({"return_full_text": False} if is_causal else {})
    size = arguments.batch_size
    answers = itertools.chain.from_iterable(
        generator.stream(prompts[start : start + size], size, options)
        for start in range(0, len(prompts), size)
    )
    hidden = arguments.disable_tqdm or not sys.stderr.isatty() or len(prompts) == 1
    hidden |= to_stdout and sys.stdout.isatty()
    answers = tqdm(answers, total=len(prompts), disable=hidden, unit=" prompts")
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        if answer.error is not None:
            raise UsageError(f"prompt {number}: {answer.error}")
        if arguments.json:
            rows = [
                {
                    "text": each["generated_text"],
                    "tokens": each["num_tokens"],
                    "ended": each["ended"],
                    **({"message": each["message"]} if "message" in each else {}),
                }
                for each in answer.output
            ]
            row = {"prompt": prompt["messages"] if arguments.chat else prompt, "sequences": rows}
            output.write(json.dumps(row, ensure_ascii=False))
            continue
        for index, sequence in enumerate(answer.output, 1):
            if len(prompts) * len(answer.output) > 1:
                label = f"{number}" + (f".{index}" if len(answer.output) > 1 else "")
                label = f"== {label} =="
                output.write(colorize(label, "faint") if to_stdout else label)
            output.write((prompt if show_prompt else "") + sequence["generated_text"])


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
    flags.add_output_flags(group, "Write a JSON object per file, each on one line.")
    group.add_argument(
        "--return_timestamps",
        choices=("segment", "word"),
        default="segment",
        help="Unit of subtitles and JSON: segments, or words. Words require a model with "
        "alignment_heads in its generation_config. Default: segment.",
    )
    group = parser.add_argument_group("speech")
    group.add_argument(
        "--language", metavar="NAME", help="Language, e.g. de or german. Default: detected."
    )
    group.add_argument(
        "--task",
        choices=("transcribe", "translate"),
        help="Transcribe, or translate to English. Default: the model's task, or transcribe.",
    )
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        help="Text that precedes the audio, for example names and terms that occur in it.",
    )
    on_rate_mismatch = group.add_argument(
        "--on_rate_mismatch",
        choices=("convert", "report"),
        default="convert",
        help="Resample files with another sampling rate, or report them as errors. Default: "
        "convert.",
    )
    add_hidden_alias(group, "--wrong_rate", on_rate_mismatch)
    flags.add_generation_flag(group, "num_beams", 1)
    flags.add_generation_flag(
        group,
        "max_new_tokens",
        help_text="Maximum number of generated tokens per 30 seconds of audio.",
    )
    group = parser.add_argument_group(
        "temperature fallback",
        "Windows of 30 seconds that do not pass the thresholds are decoded again at the\n"
        "next temperature. Common values are --temperature 0 0.2 0.4 0.6 0.8 1\n"
        "--compression_ratio_threshold 1.35 --logprob_threshold -1 --no_speech_threshold 0.6.",
    )
    for name, (options, text) in FALLBACK_FLAGS.items():
        group.add_argument(f"--{name}", type=float, metavar="X", help=text, **options)
    group.add_argument(
        "--condition_on_prev_tokens",
        action="store_true",
        default=None,
        help="Include the text of previous windows in the prompt.",
    )
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=8)


def run_transcribe(arguments: argparse.Namespace) -> int:
    """Transcribes files and directories. Returns 1 if a file cannot be transcribed."""
    from tqdm import tqdm

    from hfseq.data.audio import AudioFile, UnreadableError, find_audio
    from hfseq.pipelines.factory import pipeline
    from hfseq.pipelines.speech import to_srt

    names, durations = find_audio(arguments.files), dict[str, float]()
    for name in names:
        with contextlib.suppress(UnreadableError):  # the pipeline reports unreadable files
            durations[name] = AudioFile(name).seconds
    if arguments.output_dir and arguments.output_file:
        raise UsageError("use either --output_dir or --output_file, not both")
    folder = Path(arguments.output_dir) if arguments.output_dir else None
    targets = _transcript_files(names, folder, arguments.output_format)
    prepare_devices(arguments)
    transcribe: Any = pipeline(
        "automatic-speech-recognition",
        arguments.model,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
        resample=arguments.on_rate_mismatch == "convert",
    )
    hidden, failures = arguments.disable_tqdm or not sys.stderr.isatty(), 0
    units = "words" if arguments.return_timestamps == "word" else "segments"
    bar_format = "{l_bar}{bar}| {n:.0f}/{total:.0f} s of audio [{elapsed}<{remaining}]"
    total = sum(durations.values())
    with (
        Output(arguments.output_file) as output,
        tqdm(total=total, bar_format=bar_format, disable=hidden, file=sys.stderr) as bar,
    ):
        options = {**transcribe.options, **_transcription_options(arguments, transcribe)}
        if transcribe.is_whisper:
            options["on_progress"] = bar.update
        for name, answer in zip(names, transcribe.stream(names, options=options), strict=True):
            chunks = [] if answer.error else answer.output.get("chunks", [])
            record: dict[str, Any] = {
                "file": name,
                "seconds": round(durations.get(name, 0.0), 3),
                "text": "" if answer.error else answer.output["text"].strip(),
                units: [
                    {
                        "start": round(chunk["timestamp"][0], 3),
                        "end": round(chunk["timestamp"][1], 3),
                        "text": chunk["text"].strip(),
                    }
                    for chunk in chunks
                ],
            }
            for warning in answer.warnings:
                bar.write(f"warning: {name}: {warning}", file=sys.stderr)
            if answer.error:
                failures += 1
                record["error"] = answer.error
                bar.write(f"error: {name}: {answer.error}", file=sys.stderr)
            if arguments.json:
                output.write(json.dumps(record, ensure_ascii=False))
            if answer.error:
                continue
            if arguments.output_format == "srt":
                text = to_srt(chunks)
            elif arguments.output_format == "json":
                text = json.dumps(record, ensure_ascii=False) + "\n"
            else:
                text = record["text"] + "\n"
            if folder is not None:
                write_atomically(targets[name], text)
            elif not arguments.json and text:
                output.write(text.removesuffix("\n"))
    if failures:
        print(f"{failures} of {len(names)} files could not be transcribed", file=sys.stderr)
    return 1 if failures else 0


def _transcription_options(arguments: argparse.Namespace, transcribe: Any) -> dict[str, Any]:
    """Returns the options of the pipeline of ``hfseq transcribe``.

    Raises:
        UsageError: A flag does not apply to the model.
    """
    if not transcribe.is_whisper:
        names = ("return_timestamps", "prompt", *FALLBACK_FLAGS, "condition_on_prev_tokens")
        unused = [name for name in names if getattr(arguments, name) not in (None, "segment")]
        if unused:
            raise UsageError(
                f"{', '.join(f'--{name}' for name in unused)}: only Whisper models have these "
                f"options, but {arguments.model} is a {transcribe.model.config.model_type} model"
            )
    names = (
        *("language", "task", "num_beams", "max_new_tokens", "condition_on_prev_tokens"),
        *FALLBACK_FLAGS,
    )
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if transcribe.lacks_task(options):
        options["task"] = "transcribe"
    if arguments.prompt is not None:
        if not hasattr(transcribe.tokenizer, "get_prompt_ids"):
            raise UsageError(
                f"--prompt requires a Whisper tokenizer, but {arguments.model} has a "
                f"{type(transcribe.tokenizer).__name__}"
            )
        try:
            options["prompt_ids"] = transcribe.tokenizer.get_prompt_ids(arguments.prompt)
        except ValueError as error:  # the text contains special tokens
            raise UsageError(f"--prompt: {first_line(error)}") from error
    if not transcribe.is_whisper:
        return {"generate_kwargs": options}
    timestamps = "word" if arguments.return_timestamps == "word" else True
    return {"generate_kwargs": options, "return_timestamps": timestamps}


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
        ("decode_workers", 0, "Processes that decode images; 0 uses the main process. Default: 0."),
    )
    group = parser.add_argument_group("output")
    flags.add_output_flags(group, "Write a JSON object per image, each on one line.")
    group = parser.add_argument_group("caption")
    for name in ("num_beams", "max_new_tokens"):
        flags.add_generation_flag(group, name)
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=8)


def run_caption(arguments: argparse.Namespace) -> int:
    """Generates a caption for each image."""
    return _process_images(arguments, "image-to-text", ("num_beams", "max_new_tokens"))


def classify_images(arguments: argparse.Namespace) -> int:
    """Classifies the images in ``arguments.inputs``, which are files and directories."""
    unused = ("input_file", "candidate_labels")
    if not arguments.inputs or any(getattr(arguments, name) for name in unused):
        raise UsageError(
            "the model classifies images: pass image files or directories as arguments, and remove "
            "--input_file and --candidate_labels"
        )
    arguments.files = arguments.inputs
    return _process_images(arguments, "image-classification", ("top_k",))


def _process_images(arguments: argparse.Namespace, task: str, names: Sequence[str]) -> int:
    """Prints the pipeline's result for each image. Returns 1 if an image cannot be read.

    Args:
        arguments: The flags of the command.
        task: Task of the pipeline.
        names: Flags that are options of the task.
    """
    from tqdm import tqdm

    from hfseq.data.images import find_images

    paths, failures = find_images(arguments.files), 0
    prepare_devices(arguments)
    from hfseq.pipelines.factory import pipeline

    image_pipeline = pipeline(
        task,
        arguments.model,
        num_workers=arguments.decode_workers,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
        **{name: getattr(arguments, name) for name in names},
    )
    hidden = arguments.disable_tqdm or not sys.stderr.isatty() or len(paths) == 1
    answers = tqdm(image_pipeline.stream(paths), total=len(paths), disable=hidden, unit=" images")
    with Output(arguments.output_file) as output:
        for path, answer in zip(paths, answers, strict=True):
            if answer.error:
                failures += 1
                tqdm.write(f"error: {path}: {answer.error}", file=sys.stderr)
                record = {"file": path, "error": answer.error}
            elif task == "image-to-text":
                text = answer.output[0]["generated_text"].strip()
                record = {"file": path, "generated_text": text}
            else:
                text = ", ".join(f"{each['label']} ({each['score']:.1%})" for each in answer.output)
                labels = [{**each, "score": round(each["score"], 6)} for each in answer.output]
                record = {"file": path, "labels": labels}
            if arguments.json:
                output.write(json.dumps(record, ensure_ascii=False))
            elif not answer.error:
                output.write(f"{path}\t{text}" if len(paths) > 1 else text)
    if failures:
        print(f"{failures} of {len(paths)} images could not be read", file=sys.stderr)
    return 1 if failures else 0


def _transcript_files(names: Sequence[str], folder: Path | None, ending: str) -> dict[str, Path]:
    """Returns the output path for each audio file. Files with equal stems get distinct paths."""
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
        aliases: Whether to add the aliases that the script of the translate-ai project defines. The
            model is then the first positional argument, unless ``--checkpoint-file`` specifies it.
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
    flags.add_flag(
        group,
        "input_file",
        help_text="File with one text per line; - is standard input.",
        default_text="standard input",
    )
    flags.add_output_flags(group, "Write a JSON object per line with all results.")
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
        help="How to handle a line that cannot be translated. 'report': write an empty line, and "
        "exit with code 1 at the end. 'skip': write an empty line, and exit with code 0. "
        "'replace': replace invalid UTF-8 by U+FFFD, and translate the line. 'stop': exit at the "
        "first such line. Default: report.",
    )

    group = parser.add_argument_group("search")
    flags.add_generation_flag(group, "num_beams", default_text="the model's, or 4")
    flags.add_generation_flag(group, "num_return_sequences", 1)
    flags.add_generation_flag(
        group, "max_new_tokens", default_text="slightly more than twice the source length"
    )
    flags.add_generation_flag(group, "length_penalty")
    add_int_flags(
        group,
        ("max_source_length", None, "Maximum source length in tokens. Default: the model's."),
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
    flags.add_model_flags(group, batch_size=32)


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
    arguments = parser.parse_args(resolve_flags(argv, parser))
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
        problems.append("use either TEXT or --input_file, not both")
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

    from hfseq.pipelines.factory import pipeline

    options = {option: getattr(arguments, option) for option in TRANSLATION_OPTIONS}
    options |= {"src_lang": arguments.source_lang, "tgt_lang": arguments.target_lang}
    options["truncation"] = {"truncate": True, "split": "split", "error": False}[
        arguments.long_lines
    ]
    pause = PAUSE if total is None else None  # regular files are read without pauses
    hidden = arguments.disable_tqdm or not sys.stderr.isatty()
    failures = truncated = count = 0
    sources: deque[str] = deque()

    def keep(lines: Iterable[str]) -> Iterator[str]:
        """Yields the lines, and stores each line until its translation arrives."""
        for line in lines:
            sources.append(line)
            yield line

    with Output(arguments.output_file) as output:
        prepare_devices(arguments)
        translate = pipeline(
            "translation",
            arguments.model,
            precision=arguments.precision,
            batch_size=arguments.batch_size,
            return_details=True,
            **{name: value for name, value in options.items() if value is not None},
        )
        with tqdm(total=total, unit=" lines", disable=hidden, file=sys.stderr) as bar:
            for answer in translate.stream(keep(lines), pause=pause):
                source, count = sources.popleft(), count + 1
                location = f"{name}:{count}"
                if isinstance(source, BadLine) and source.usable:
                    answer.warnings.insert(0, source.problem)
                for warning in answer.warnings:
                    bar.write(f"warning: {location}: {warning}", file=sys.stderr)
                if answer.error:
                    bar.write(f"error: {location}: {answer.error}", file=sys.stderr)
                    if arguments.on_bad_line == "stop":
                        raise DataError(f"stopped at {location} (--on_bad_line stop)")
                output.write(_render(count, source, answer, arguments))
                bar.update()
                failures += answer.error is not None
                truncated += any(not each["ended"] for each in answer.output or [])
    if failures:
        text = f"{failures} of {count} lines could not be translated and are empty in the output"
        print(text, file=sys.stderr)
    if truncated:
        text = (
            f"{truncated} of {count} translations reached the maximum length and may be truncated"
        )
        print(f"{text} (increase --max_new_tokens)", file=sys.stderr)
    return 1 if failures and arguments.on_bad_line != "skip" else 0


def _render(line: int, source: str, answer: Answer, arguments: argparse.Namespace) -> str:
    """Returns the output for an input line: one line per translation, or a JSON object."""
    translations = [
        {"text": one_line(each["translation_text"]), "score": each.get("score")}
        | {"ended": each["ended"]}
        for each in answer.output or []
    ]
    if arguments.json:
        record: dict[str, Any] = {
            "line": line,
            "source": str(source),
            "translations": translations,
            "warnings": answer.warnings,
        }
        if answer.error:
            record["error"] = answer.error
        return json.dumps(record, ensure_ascii=False)
    texts = [each["text"] for each in translations]
    if arguments.scores:
        texts = [
            ("" if each["score"] is None else format(each["score"], ".4f")) + f"\t{each['text']}"
            for each in translations
        ]
    # The number of lines per text is constant, so that line numbers of input and output correspond.
    return "\n".join(texts or [""] * arguments.num_return_sequences)
