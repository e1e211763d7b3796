"""Flags from dataclasses: help that can be read, and mistakes that end in one line."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hfseq.errors import UsageError, nearest


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


def names(parts: Iterable[type]) -> set[str]:
    """Return the names of all flags."""
    return {field.name for part in parts for field in dataclasses.fields(part)}


def _unknown(rest: list[str], known: Iterable[str]) -> str:
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if not flags:
        return f"no flag takes {shlex.join(rest)}: values follow their flag, which begins with --"
    meant = [nearest(flag, [f"--{name}" for name in known]) for flag in flags]
    return "unknown flag " + ", ".join(map("".join, zip(flags, meant, strict=True)))
