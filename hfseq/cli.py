"""The ``hfseq`` command: its parts, their order, and what they share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hfseq import __version__
from hfseq.commands import (
    compare,
    completion,
    convert,
    environment,
    fill_mask,
    generate,
    inspect,
    new,
    plan,
    push,
    report,
    translate,
)
from hfseq.errors import run_command
from hfseq.flags import refuse_secrets

EXAMPLES = """examples:
  hfseq env                              versions, plugins and devices, for a bug report
  hfseq new my-encoder                   write my_encoder.py, a working architecture in one file
  hfseq plan --config gpt2 --devices h200:8   memory, exchange and time of a run, beforehand
  hfseq report DIR                       how a run is going, or went
  hfseq compare DIR DIR                  curves over each other, and which flags differ
  hfseq inspect DIR                      what a checkpoint holds, and what is wrong with it
  hfseq convert DIR OUT --to msgpack     the same weights in another format
  hfseq fill-mask DIR "a <mask> text"    what a trained masked language model puts there
  hfseq generate DIR "Once upon a time"  what a language model writes
  hfseq translate DIR < in.txt           translate line by line with a translation model
  hfseq push DIR --hub_model_id me/it    upload a model directory as one commit

Documentation: docs/cli.md and docs/plugins.md."""

Add = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]
#: name, what it does, its flags, its work, examples
COMMANDS: tuple[tuple[str, str, Add, Run, str], ...] = (
    (
        *("env", "show versions, plugins and devices"),
        *(environment.add_env, environment.run_env, "hfseq env --json"),
    ),
    (
        *("plugins", "show what every plugin adds"),
        *(environment.add_plugins, environment.run_plugins, "hfseq plugins --json"),
    ),
    (
        *("new", "write a working architecture in one file"),
        *(new.add_new, new.run_new, "hfseq new my-encoder"),
    ),
    (
        *("plan", "say what a training run needs and takes, without its devices"),
        *(plan.add_plan, plan.run_plan),
        "hfseq plan --config gpt2 --mesh data=8,fsdp=8 --devices h200:64 --length 1024",
    ),
    (
        *("report", "show how a run is going, or went"),
        *(report.add_report, report.run_report, report.EXAMPLES),
    ),
    (
        *("compare", "lay the curves of runs over each other"),
        *(compare.add_compare, compare.run_compare, compare.EXAMPLES),
    ),
    (
        *("inspect", "show what a checkpoint holds, and what is wrong with it"),
        *(inspect.add_inspect, inspect.run_inspect, inspect.EXAMPLES),
    ),
    (
        *("convert", "write a model's weights in another format or type"),
        *(convert.add_convert, convert.run_convert, convert.EXAMPLES),
    ),
    (
        *("fill-mask", "let a masked language model fill masks"),
        *(fill_mask.add_fill_mask, fill_mask.run_fill_mask),
        f'hfseq fill-mask my-roberta "Return the {fill_mask.MASK} of the list."',
    ),
    (
        *("generate", "let a language model write"),
        *(generate.add_generate, generate.run_generate, generate.EXAMPLES),
    ),
    (
        *("translate", "translate text, a file or standard input"),
        *(translate.add_translate, translate.run_translate),
        'hfseq translate my-translator "The cat is blue." --num_beams 4',
    ),
    (
        *("push", "push a model directory to the Hub"),
        *(push.add_push, push.run_push),
        "hfseq push my-roberta --hub_model_id user/my-roberta",
    ),
    (
        *("completion", "print a script that completes commands and flags in a shell"),
        *(completion.add_completion, completion.run_completion, completion.EXAMPLES),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for errors, 2 for wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), debug="--debug" in words)


def _run(words: Sequence[str]) -> int:
    refuse_secrets(words)
    arguments = build_parser().parse_args(words)
    arguments.plugin += arguments.plugin_after
    return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run`` to its function."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="hfseq",
        description="JAX/Flax sequence models on Hugging Face: runs, checkpoints, models, plugins.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"hfseq {__version__}")
    _add_common(parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text, add, run, examples in COMMANDS:
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n  ".join(["examples:", *examples.splitlines()]),
            formatter_class=formatter,
        )
        _add_common(sub, "_after")
        add(sub)
        sub.set_defaults(run=run)
    return parser


def _add_common(parser: argparse.ArgumentParser, suffix: str = "") -> None:
    """Add what may stand before and after the command; argparse keeps only one of equal names."""
    text = "load this plugin file too (repeatable)"
    where = f"plugin{suffix}"
    parser.add_argument(
        "--plugin", action="append", metavar="FILE", default=[], dest=where, help=text
    )
    text = "show tracebacks of errors"
    parser.add_argument("--debug", action="store_true", dest=f"debug{suffix}", help=text)


if __name__ == "__main__":
    sys.exit(main())
