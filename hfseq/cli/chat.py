"""Command-line interface of ``hfseq chat``: a conversation in the terminal or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hfseq.cli import flags
from hfseq.cli.models import input_lines, prepare_devices
from hfseq.cli.text import add_json, colorize
from hfseq.errors import DataError, UsageError, parse_json
from hfseq.pipelines.lines import Output

if TYPE_CHECKING:
    from hfseq.pipelines.chat import Chat

EXAMPLES = """hfseq chat HuggingFaceTB/SmolLM2-135M-Instruct
hfseq chat my-qwen --system "Answer in one sentence." --temperature 0.7 --top_p 0.9
hfseq chat Qwen/Qwen3-0.6B --tools tools.json --chat_template_kwargs '{"enable_thinking": false}'
hfseq chat my-adapter --input_file questions.txt --output_file answers.jsonl --json"""


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq chat``."""
    parser.add_argument("model", metavar="MODEL", help="Directory or Hub name of a causal LM.")
    group = parser.add_argument_group("conversation")
    flags.add_template_flags(group)
    flags.add_flag(
        group,
        "input_file",
        help_text="File with one user message per line, or a .jsonl file with one message per "
        "line (of the user or of a tool); - is standard input.",
        default_text="a prompt in the terminal, or standard input",
    )
    flags.add_flag(group, "output_file", default_text="standard output")
    add_json(
        group,
        "Write a JSON object per answer, with role, content and, if the tokenizer has a "
        "response_template, reasoning_content and tool_calls.",
    )
    group = parser.add_argument_group("answers")
    flags.add_generation_flag(group, "max_new_tokens", 512)
    flags.add_generation_flag(
        group, "temperature", help_text="Sampling temperature; 0 decodes greedily."
    )
    for name in ("top_p", "top_k"):
        flags.add_generation_flag(group, name)
    flags.add_flag(group, "seed")
    flags.add_model_flags(parser.add_argument_group("model"))


def run_chat(arguments: argparse.Namespace) -> int:
    """Answers user messages until the input ends."""
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    ranges = (
        ("temperature", sampling.get("temperature", 1) >= 0, "at least 0"),
        ("top_p", 0 < sampling.get("top_p", 1) <= 1, "above 0 and at most 1"),
        ("top_k", sampling.get("top_k", 1) >= 0, "at least 0"),
    )
    problems = [
        f"--{flag} {getattr(arguments, flag)} must be {rule}"
        for flag, valid, rule in ranges
        if not valid
    ]
    if sampling.get("temperature") == 0 and len(sampling) > 1:
        problems.append("--temperature 0 decodes greedily: remove --top_p and --top_k")
    if problems:
        raise UsageError("; ".join(problems))
    options: dict[str, Any] = {"do_sample": True, **sampling} if sampling else {}
    if sampling.get("temperature") == 0:
        options = {"do_sample": False}
    options |= flags.template_options(arguments)
    interactive = arguments.input_file is None and sys.stdin.isatty()
    lines, name = ([], "") if interactive else input_lines(arguments.input_file, "answering")
    from hfseq.pipelines.chat import Chat

    with Output(arguments.output_file) as output:
        prepare_devices(arguments)
        chat = Chat.from_pretrained(
            arguments.model,
            precision=arguments.precision,
            system=arguments.system,
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            **options,
        )
        if interactive:
            commands = (
                "/clear starts a new conversation, /exit or Ctrl-D exits, Ctrl-C stops an answer"
            )
            if arguments.tools:
                commands += ", /tool RESULT answers a tool call"
            print(colorize(f"{arguments.model}: {commands}", "faint"), file=sys.stderr)
        hidden = arguments.json or arguments.output_file or not sys.stdout.isatty()
        turns = _typed("" if hidden else "> ") if interactive else lines
        is_jsonl = str(arguments.input_file).endswith(".jsonl")
        for number, line in enumerate(turns, 1):
            if problem := getattr(line, "problem", None):
                raise DataError(f"{name}:{number}: {problem}")
            text = line.strip()
            if text == "/exit":
                break
            if text == "/clear":
                chat.clear()
            elif text:
                message = _parse_message(text, name, number) if is_jsonl else text
                if interactive and text.startswith("/tool "):
                    message = {"role": "tool", "content": text.removeprefix("/tool ")}
                _answer(chat, message, arguments, output, interactive)
    return 0


def _typed(prompt: str) -> Iterator[str]:
    """Yields typed lines until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):  # enables line editing and a history
        import readline  # noqa: F401
    while True:
        try:
            text = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        yield text


def _parse_message(text: str, name: str, number: int) -> str | dict[str, Any]:
    """Parses a line of a .jsonl file: a user message as a string, or a message with a role."""
    try:
        message = parse_json(text)
    except ValueError as error:
        raise DataError(f"{name}:{number}: {error}") from None
    if not isinstance(message, str | dict):
        raise DataError(f"{name}:{number}: {text:.60} is neither a string nor a message")
    return message


def _answer(
    chat: Chat,
    message: str | dict[str, Any],
    arguments: argparse.Namespace,
    output: Output,
    interactive: bool,
) -> None:
    """Prints the answer while it is generated, or writes it when it is complete."""
    streamed, dropped = not arguments.json and output.name is None, chat.dropped_turns
    content = ""
    try:
        with contextlib.closing(chat.reply(message)) as pieces:
            for piece in pieces:
                content += piece
                if streamed:
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not interactive:
            raise
    except UsageError as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)
        return
    if streamed:
        print(flush=True)
    elif arguments.json:
        output.write(json.dumps(chat.messages[-1], ensure_ascii=False))
    else:
        output.write(content)
    if chat.dropped_turns and not dropped:
        print(
            "the conversation exceeds the model's maximum length: its oldest messages are ignored "
            "from now on",
            file=sys.stderr,
        )
