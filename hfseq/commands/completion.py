"""``hfseq completion``: scripts by which shells complete commands, flags and their values.

They are made from the parser itself, so they know every flag; nothing is started while one types.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

EXAMPLES = """eval "$(hfseq completion bash)"      # in ~/.bashrc for all shells to come
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
    from hfseq.cli import build_parser

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
