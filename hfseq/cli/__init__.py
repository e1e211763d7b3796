"""The ``hfseq`` command: its parts, their order, and what they share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hfseq.cli import convert, inspect, models, plan, project, report
from hfseq.cli import report as compare
from hfseq.errors import run_command
from hfseq.pipelines import fill_mask
from hfseq.plugins import __version__
from hfseq.training.arguments import refuse_secrets

COMPLETION_EXAMPLES = """eval "$(hfseq completion bash)"      # in ~/.bashrc for all shells to come
hfseq completion zsh > "${fpath[1]}/_hfseq"
hfseq completion fish > ~/.config/fish/completions/hfseq.fish"""


SHELLS = ("bash", "zsh", "fish")


class Flag(NamedTuple):
    """A flag: its spellings, the values it is limited to, whether it takes one, its help."""

    names: list[str]
    values: list[str]
    takes: bool
    text: str


class Command(NamedTuple):
    """A command: its help, its flags, and the words that it takes where these are limited."""

    text: str
    flags: list[Flag]
    words: list[str]


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to write the script for")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""

    print("\n".join(SCRIPTS[arguments.shell](read(build_parser()))))
    return 0


def read(parser: argparse.ArgumentParser) -> dict[str, Command]:
    """Return the commands of ``parser`` by name; the parser itself is the command ''."""
    found = {"": Command("", _flags(parser), [])}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                found[name] = Command(helps.get(name, ""), _flags(sub), _words(sub))
    return found


def _flags(parser: argparse.ArgumentParser) -> list[Flag]:
    return [
        Flag(
            list(action.option_strings),
            [str(choice) for choice in action.choices or ()],
            action.nargs != 0,
            _plain(action.help or ""),
        )
        for action in parser._actions
        if action.option_strings
    ]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    positional = [action for action in parser._actions if not action.option_strings]
    return [str(choice) for action in positional[:1] for choice in action.choices or ()]


def _plain(text: str) -> str:
    """Take away what means something between quotes in one of the shells."""
    return re.sub(r"\s+", " ", re.sub(r"[\[\]\"`$\\:]", "", text.replace("'", "’")))


def bash(commands: dict[str, Command]) -> Iterator[str]:
    """Yield the lines of the script for bash (3.2 and later, with or without bash-completion)."""
    yield "# completion of hfseq for bash; made by `hfseq completion bash`"
    yield "_hfseq() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '    local command="" flags="" words="" i'
    names = "|".join(name for name in commands if name)
    yield "    COMPREPLY=()"
    yield "    for ((i = 1; i < COMP_CWORD; i++)); do"
    yield f'        case "${{COMP_WORDS[i]}}" in {names}) command=${{COMP_WORDS[i]}}; break;; esac'
    yield "    done"
    yield '    case "$command $before" in'
    for name, command in commands.items():
        for flag in command.flags:
            if flag.takes:
                cases = "|".join(f'"{name} {spelling}"' for spelling in flag.names)
                if flag.values:
                    reply = f'COMPREPLY=($(compgen -W "{" ".join(flag.values)}" -- "$word"))'
                else:
                    reply = 'COMPREPLY=($(compgen -f -- "$word"))'
                yield f"        {cases}) {reply}; return;;"
    yield "    esac"
    yield '    case "$command" in'
    for name, command in commands.items():
        spellings = " ".join(spelling for flag in command.flags for spelling in flag.names)
        words = " ".join(command.words if name else (n for n in commands if n))
        yield f'        "{name}") flags="{spellings}" words="{words}";;'
    yield "    esac"
    yield '    if [[ "$word" == -* ]]; then'
    yield '        COMPREPLY=($(compgen -W "$flags" -- "$word"))'
    yield '    elif [[ -n "$words" ]]; then'
    yield '        COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "    else"
    yield '        COMPREPLY=($(compgen -f -- "$word"))'
    yield "    fi"
    yield "}"
    yield "complete -o filenames -F _hfseq hfseq"


def zsh(commands: dict[str, Command]) -> Iterator[str]:
    """Yield the lines of the script for zsh, as a file of ``fpath`` or to be evaluated."""
    yield "#compdef hfseq"
    yield "# completion of hfseq for zsh; made by `hfseq completion zsh`"
    yield "_hfseq() {"
    yield "    local context state state_descr line curcontext=$curcontext"
    yield "    typeset -A opt_args"
    yield "    _arguments -C \\"
    yield from (f"        {spec} \\" for flag in commands[""].flags for spec in _zsh_flag(flag))
    yield "        '1:command:->command' '*::argument:->argument'"
    yield "    case $state in"
    yield "        command)"
    yield "            local -a commands=("
    for name, command in commands.items():
        if name:
            yield f"                '{name}:{_plain(command.text)}'"
    yield "            )"
    yield "            _describe command commands;;"
    yield "        argument)"
    yield "            case $line[1] in"
    for name, command in commands.items():
        if name:
            words = f"'1:word:({' '.join(command.words)})'" if command.words else "'*:file:_files'"
            yield f"                {name}) _arguments \\"
            for flag in command.flags:
                yield from (f"                    {spec} \\" for spec in _zsh_flag(flag))
            yield f"                    {words};;"
    yield "            esac;;"
    yield "    esac"
    yield "}"
    yield 'if [[ "$funcstack[1]" == _hfseq ]]; then _hfseq "$@"; else compdef _hfseq hfseq; fi'


def _zsh_flag(flag: Flag) -> Iterator[str]:
    value = f":value:({' '.join(flag.values)})" if flag.values else ":value:_files"
    for name in flag.names:
        yield f"'{name}[{flag.text}]{value if flag.takes else ''}'"


def fish(commands: dict[str, Command]) -> Iterator[str]:
    """Yield the lines of the script for fish."""
    yield "# completion of hfseq for fish; made by `hfseq completion fish`"
    yield "complete -c hfseq -n __fish_use_subcommand -f"
    for name, command in commands.items():
        where = f"__fish_seen_subcommand_from {name}" if name else "__fish_use_subcommand"
        if name:
            text = _plain(command.text)
            yield f"complete -c hfseq -n __fish_use_subcommand -f -a {name} -d '{text}'"
        if command.words:
            yield f"complete -c hfseq -n '{where}' -f -a '{' '.join(command.words)}'"
        for flag in command.flags:
            spelled = " ".join(_fish_name(spelling) for spelling in flag.names)
            takes = f" -x -a '{' '.join(flag.values)}'" if flag.values else " -r" * flag.takes
            yield f"complete -c hfseq -n '{where}' {spelled}{takes} -d '{flag.text}'"


def _fish_name(spelling: str) -> str:
    return f"-l {spelling[2:]}" if spelling.startswith("--") else f"-s {spelling[1:]}"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


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
        *(project.add_env, project.run_env, "hfseq env --json"),
    ),
    (
        *("plugins", "show what every plugin adds"),
        *(project.add_plugins, project.run_plugins, "hfseq plugins --json"),
    ),
    (
        *("new", "write a working architecture in one file"),
        *(project.add_new, project.run_new, "hfseq new my-encoder"),
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
        *(compare.add_compare, compare.run_compare, compare.COMPARE_EXAMPLES),
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
        *(models.add_fill_mask, models.run_fill_mask),
        f'hfseq fill-mask my-roberta "Return the {fill_mask.MASK} of the list."',
    ),
    (
        *("generate", "let a language model write"),
        *(models.add_generate, models.run_generate, models.EXAMPLES),
    ),
    (
        *("translate", "translate text, a file or standard input"),
        *(models.add_translate, models.run_translate),
        'hfseq translate my-translator "The cat is blue." --num_beams 4',
    ),
    (
        *("push", "push a model directory to the Hub"),
        *(project.add_push, project.run_push),
        "hfseq push my-roberta --hub_model_id user/my-roberta",
    ),
    (
        *("completion", "print a script that completes commands and flags in a shell"),
        *(add_completion, run_completion, COMPLETION_EXAMPLES),
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
