"""Flags from dataclasses: help that can be read, and mistakes that end in one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hfseq.errors import UsageError, nearest

#: Flags of other programs that take, or ask for, a token of the Hub.
SECRETS = ("__token", "__hub_token", "__use_auth_token", "__push_to_hub_token")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Flags in one spelling each, with the defaults that say something."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32} | kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, "", [], argparse.SUPPRESS) or action.nargs in (0, "?"):
            return action.help
        shown = " ".join(default) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown})"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return ", ".join(names or action.option_strings) + _values(action)


def _values(action: argparse.Action) -> str:
    if action.nargs in (0, "?"):
        return ""
    kind = getattr(action.type, "__name__", "str")
    name = {"int": " N", "float": " X"}.get(kind, " VALUE")
    return f"{name} [...]" if action.nargs == "+" else name


def make_parser(parts: Iterable[Any], description: str | None = None) -> Any:
    """Return the ``HfArgumentParser`` of the dataclasses ``parts``."""
    from transformers import HfArgumentParser

    return HfArgumentParser(
        parts,
        description=description,
        formatter_class=Formatter,
        usage="%(prog)s [flags]   (--help lists them)",
    )


def parse_flags(
    parts: Sequence[type], argv: Sequence[str], description: str | None = None
) -> tuple[Any, ...]:
    """Return an instance of each dataclass in ``parts``; mistakes end with exit code 2."""
    parser = make_parser(parts, description)
    try:
        *found, rest = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(str(error)) from error
    if rest:
        raise UsageError(_unknown(rest, names(parts)))
    return tuple(found)


def refuse_secrets(words: Iterable[str]) -> None:
    """Refuse a token among the flags: everybody on the machine can read it in the process list.

    To be called before parsing, which would take ``--token`` for an abbreviation.

    Raises:
        UsageError: one of ``words`` is a flag of a token.
    """
    for word in words:
        flag = word.partition("=")[0].replace("-", "_")
        if flag in SECRETS:
            raise UsageError(
                f"--{flag[2:]}: tokens are no flags, for these stand in the process list and in "
                "logs; set HF_TOKEN, or log in once with `hf auth login`"
            )


def names(parts: Iterable[type]) -> set[str]:
    """Return the names of all flags."""
    return {field.name for part in parts for field in dataclasses.fields(part)}


def _unknown(rest: list[str], known: Iterable[str]) -> str:
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if not flags:
        return f"no flag takes {shlex.join(rest)}: values follow their flag, which begins with --"
    meant = [nearest(flag, [f"--{name}" for name in known]) for flag in flags]
    return "unknown flag " + ", ".join(map("".join, zip(flags, meant, strict=True)))


def flags_of_file(path: Path, known: set[str]) -> list[str]:
    """Turn a YAML or JSON file of arguments, whose names are ``known``, into flags."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"cannot read the argument file {path}: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must map argument names to values, e.g. learning_rate: 3.0e-4")
    refuse_secrets(f"--{name}" for name in values)
    unknown = [f"'{name}'{nearest(str(name), known)}" for name in values if name not in known]
    if unknown:
        raise UsageError(f"{path} has unknown arguments: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value not in (None, []):
            items = value if isinstance(value, list) else [value]
            # No shell has seen these, and every training_args.json writes the home folder as `~`.
            flags += [f"--{name}", *(os.path.expanduser(str(item)) for item in items)]
    return flags
