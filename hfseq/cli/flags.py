"""Flags that several commands share.

Each flag is defined once, so that it has the same name, type, check and meaning in all commands. A
command selects its flags and their default values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfseq.cli.text import add_hidden_alias
from hfseq.errors import UsageError, parse_json


class AtLeastOne(argparse.Action):
    """Stores a number, and raises `UsageError` if it is below 1."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Checks and stores the number."""
        if values < 1:
            raise UsageError(f"--{self.dest} {values} must be at least 1")
        setattr(namespace, self.dest, values)


_COUNT: Mapping[str, Any] = {"type": int, "metavar": "N", "action": AtLeastOne}
_INTEGER: Mapping[str, Any] = {"type": int, "metavar": "N"}
_NUMBER: Mapping[str, Any] = {"type": float, "metavar": "X"}

#: Arguments of ``add_argument`` by flag. Help texts do not mention the default.
FLAGS: dict[str, dict[str, Any]] = {
    "precision": {
        "metavar": "NAME",
        "default": "float32",
        "help": "Precision recipe, such as float32 or bfloat16.",
    },
    "device": {
        "choices": ("cpu", "cuda", "gpu", "tpu"),
        "help": "Fail unless this type of device is available.",
    },
    "batch_size": {**_COUNT, "help": "Number of inputs per batch."},
    "top_k": {**_COUNT, "help": "Number of results per input, the most likely first."},
    "disable_tqdm": {"action": "store_true", "help": "Do not show a progress bar."},
    "input_file": {"metavar": "FILE", "help": "Input file; - is standard input."},
    "output_file": {
        "metavar": "FILE",
        "help": "Output file, named FILE.part until it is complete.",
    },
    "seed": {**_INTEGER, "default": 0, "help": "Random seed."},
}

#: Arguments of ``add_argument`` for the flags that are fields of ``GenerationConfig``.
GENERATION_FLAGS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {**_COUNT, "help": "Maximum number of generated tokens per output."},
    "min_new_tokens": {**_INTEGER, "help": "Minimum number of generated tokens per output."},
    "num_beams": {**_COUNT, "help": "Number of beams; 1 disables beam search."},
    "num_return_sequences": {
        **_COUNT,
        "help": "Number of outputs per input: samples, or the best beams.",
    },
    "temperature": {
        **_NUMBER,
        "help": "Sampling temperature; values below 1 favor likely tokens.",
    },
    "top_k": {**_INTEGER, "help": "Sample from the k most likely tokens; 0 for all tokens."},
    "top_p": {
        **_NUMBER,
        "help": "Sample from the most likely tokens with this total probability.",
    },
    "min_p": {
        **_NUMBER,
        "help": "Minimum probability of a sampled token relative to the most likely token.",
    },
    "typical_p": {**_NUMBER, "help": "Probability mass of locally typical sampling."},
    "repetition_penalty": {**_NUMBER, "help": "Penalty for repeated tokens; 1 disables it."},
    "no_repeat_ngram_size": {**_INTEGER, "help": "Size of n-grams that may occur only once."},
    "length_penalty": {
        **_NUMBER,
        "help": "Length penalty of beam search; values above 0 favor long texts.",
    },
}

#: Earlier spellings, which help does not show.
ALIASES: Mapping[str, Sequence[str]] = {"disable_tqdm": ("--no_progress",)}


def add_flag(
    group: argparse._ActionsContainer,
    name: str,
    default: Any = None,
    *,
    default_text: str | None = None,
    help_text: str | None = None,
    aliases: Sequence[str] = (),
) -> None:
    """Adds one of `FLAGS`.

    Args:
        group: The parser or group.
        name: Name of the flag.
        default: Default value in this command. If omitted, the default in `FLAGS` is used.
        default_text: Description of the default in the help, for a flag without a default value.
        help_text: More specific help for this command. The meaning of the flag must be the same.
        aliases: Earlier spellings of the flag in this command, which help does not show.
    """
    _add(group, name, FLAGS[name], default, default_text, help_text, aliases)


def add_generation_flag(
    group: argparse._ActionsContainer,
    name: str,
    default: Any = None,
    *,
    default_text: str = "the model's",
    help_text: str | None = None,
) -> None:
    """Adds one of `GENERATION_FLAGS`, with the arguments of `add_flag`."""
    _add(group, name, GENERATION_FLAGS[name], default, default_text, help_text, ())


def _add(
    group: argparse._ActionsContainer,
    name: str,
    definition: Mapping[str, Any],
    default: Any,
    default_text: str | None,
    help_text: str | None,
    aliases: Sequence[str],
) -> None:
    options = {**definition, "help": help_text or definition["help"]}
    if default is not None:
        options["default"] = default
    described = default_text if options.get("default") is None else options["default"]
    if described is not None:
        options["help"] += f" Default: {described}."
    action = group.add_argument(f"--{name}", **options)
    for alias in (*ALIASES.get(name, ()), *aliases):
        add_hidden_alias(group, alias, action)


def add_model_flags(group: argparse._ActionsContainer, batch_size: int | None = None) -> None:
    """Adds the flags of all commands that run a model.

    Args:
        group: The group.
        batch_size: Default of ``--batch_size``, or `None` for a command without batches.
    """
    if batch_size is not None:
        add_flag(group, "batch_size", batch_size)
    add_flag(group, "precision")
    add_flag(group, "device", default_text="any device")


def add_output_flags(
    group: argparse._ActionsContainer, json_text: str, output_file: str | None = None
) -> None:
    """Adds the flags of the output of commands that process many inputs.

    Args:
        group: The group.
        json_text: Help text of ``--json``.
        output_file: More specific help for ``--output_file``.
    """
    add_flag(group, "output_file", default_text="standard output", help_text=output_file)
    group.add_argument("--json", action="store_true", help=json_text)
    add_flag(group, "disable_tqdm")


def add_template_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags of commands that format conversations with a chat template."""
    group.add_argument("--system", metavar="TEXT", help="System message. Default: none.")
    group.add_argument(
        "--chat_template",
        metavar="FILE",
        help="File with a Jinja chat template. Default: the tokenizer's template.",
    )
    group.add_argument(
        "--chat_template_kwargs",
        metavar="JSON",
        help="Variables of the chat template, e.g. '{\"enable_thinking\": false}'.",
    )
    group.add_argument(
        "--tools",
        metavar="FILE",
        help="JSON file with the schemas of the functions that the model may call.",
    )


def template_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the flags of `add_template_flags`, except ``--system``.

    Returns:
        A dictionary with the keys ``chat_template``, ``chat_template_kwargs`` and ``tools``. Keys
        whose flags are not set are omitted.

    Raises:
        UsageError: A file cannot be read, or its content is not valid.
    """
    options: dict[str, Any] = {}
    if arguments.chat_template:
        options["chat_template"] = _read_text("--chat_template", arguments.chat_template)
    if arguments.chat_template_kwargs is not None:
        flag = f"--chat_template_kwargs {arguments.chat_template_kwargs}"
        variables = _parse_json(flag, arguments.chat_template_kwargs)
        if not isinstance(variables, dict):
            raise UsageError(
                f"{flag} is not a JSON object, such as '{{\"enable_thinking\": false}}'"
            )
        options["chat_template_kwargs"] = variables
    if arguments.tools:
        flag = f"--tools {arguments.tools}"
        tools = _parse_json(flag, _read_text("--tools", arguments.tools))
        tools = tools if isinstance(tools, list) else [tools]
        if not tools or not all(isinstance(tool, dict) for tool in tools):
            raise UsageError(f"{flag} must contain a JSON list of function schemas")
        options["tools"] = tools
    return options


def _read_text(flag: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _parse_json(flag: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not valid JSON: {error}") from None
