"""`hfseq train`: trains with an objective, and lists the objectives."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from hfseq import plugins
from hfseq.errors import UsageError, run_command
from hfseq.training import script
from hfseq.training.usage import ALIASES, summary

DESCRIPTION = """Train, fine-tune or evaluate a model.

    hfseq train --list                     list the objectives
    hfseq train OBJECTIVE --help           show examples and all flags of an objective
    hfseq train mlm --output_dir my-roberta --model_name_or_path FacebookAI/roberta-base \\
        --train_file corpus.txt

The first flag can be replaced by a YAML or JSON file with flags. To continue a stopped run from its
last checkpoint, run the same command again. Guide: docs/training.md."""


def main(arguments: Sequence[str], plugin_files: Sequence[str] = (), debug: bool = False) -> int:
    """Runs ``hfseq train`` and returns the exit code.

    Args:
        arguments: The words after ``train``.
        plugin_files: Plugin files that were named before ``train``.
        debug: Whether to show the tracebacks of errors.
    """
    words = list(arguments)
    if words and not words[0].startswith("-"):
        flags = words[1:] + ["--debug"] * debug
        if plugin_files:
            flags = _add_plugins(flags, plugin_files)
        return script.train(words[0], flags, program="hfseq train")
    return run_command(lambda: _list_or_help(words, plugin_files), debug=debug)


def _add_plugins(flags: Sequence[str], plugin_files: Sequence[str]) -> list[str]:
    """Returns the flags with ``plugin_files`` added to the values of ``--plugin``."""
    flags = list(flags)
    if "--plugin" in flags:
        position = flags.index("--plugin") + 1
        return [*flags[:position], *plugin_files, *flags[position:]]
    return [*flags, "--plugin", *plugin_files]


def _list_or_help(words: Sequence[str], plugin_files: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hfseq train",
        usage="hfseq train OBJECTIVE [flags]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="List the objectives.")
    parser.add_argument("--json", action="store_true", help="With --list: print JSON.")
    parser.add_argument(
        "--plugin", nargs="+", default=[], metavar="FILE", help="Plugin files to load."
    )
    parsed, other_words = parser.parse_known_args(words)
    registered = plugins.load(extra=[*plugin_files, *parsed.plugin]).objectives
    if not parsed.list or other_words:
        raise UsageError(
            f"no objective: use hfseq train OBJECTIVE, one of {', '.join(registered)} "
            "(hfseq train --list describes them)"
        )
    rows = [
        {
            "objective": entry.name,
            "aliases": [alias for alias, name in ALIASES.items() if name == entry.name],
            "summary": summary(entry.name),
            "plugin": entry.plugin,
        }
        for entry in registered.entries()
    ]
    if parsed.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(entry.name) for entry in registered.entries()) + 2
    for entry in registered.entries():
        text = summary(entry.name) or f"From the plugin {entry.plugin}."
        aliases = [alias for alias, name in ALIASES.items() if name == entry.name]
        if aliases:
            text += f" Also called {', '.join(aliases)}."
        indent = " " * width
        wrapped = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent)
        print(f"{entry.name:{width}}{wrapped[width:]}")
    return 0
