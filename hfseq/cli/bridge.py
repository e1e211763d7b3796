"""`hfseq bridge`: exports bridged models, and compares architectures with PyTorch."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from hfseq import plugins
from hfseq.errors import run_command

DESCRIPTION = """Tools for models that run the PyTorch code of Transformers in JAX.

    hfseq bridge export DIR --batch_sizes 1 8 --lengths 64 256
    hfseq bridge coverage --help

Guide: docs/bridge.md."""

#: The module of each command. It has the functions `add_flags(parser)` and `run(arguments)`.
COMMANDS = {
    "export": (
        "write programs that run a model without PyTorch",
        "hfseq_plugins.bridge.export_command",
    ),
    "coverage": (
        "compare tiny models of all architectures with PyTorch",
        "hfseq_plugins.bridge.coverage",
    ),
}


def main(arguments: Sequence[str], plugin_files: Sequence[str] = (), debug: bool = False) -> int:
    """Runs ``hfseq bridge`` and returns the exit code.

    Args:
        arguments: The words after ``bridge``.
        plugin_files: Plugin files that were named before ``bridge``.
        debug: Whether to show the tracebacks of errors.
    """
    words = [word for word in arguments if word != "--debug"]
    return run_command(
        lambda: _run(words, plugin_files), debug=debug or len(words) < len(arguments)
    )


def _run(words: Sequence[str], plugin_files: Sequence[str]) -> int:
    plugins.load(extra=plugin_files)
    parser = argparse.ArgumentParser(
        prog="hfseq bridge",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    requested = next((word for word in words if not word.startswith("-")), None)
    for name, (summary, module_name) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        if name == requested:  # the others may need packages that are not installed
            module: Any = importlib.import_module(module_name)
            module.add_flags(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(list(words))
    return parsed.run(parsed)
