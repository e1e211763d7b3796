"""``hfseq completion``: real shells load the scripts and complete commands and flags."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from hfseq import cli

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the completion script of each shell."""
    from contextlib import redirect_stdout

    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with (folder / shell).open("w") as file, redirect_stdout(file):
            assert cli.main(["completion", shell]) == 0
    return folder


def need(shell: str) -> str:
    return shutil.which(shell) or pytest.skip(f"{shell} is not installed")


def output(*command: str) -> list[str]:
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0 and not process.stderr, process.stderr
    return process.stdout.split("\n")


def bash(scripts: Path, *words: str) -> list[str]:
    """Returns bash's completions for the last of ``words``."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {scripts / 'bash'}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        f"_shtab_hfseq hfseq '{words[-1]}' '{words[-2]}'; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return [line for line in output(need("bash"), "--norc", "-c", code) if line]


def fish(scripts: Path, *words: str) -> list[str]:
    code = f"source {scripts / 'fish'}; complete -C '{' '.join(words)}'"
    return [line.split("\t")[0] for line in output(need("fish"), "-N", "-c", code) if line]


CASES = [
    (("hfseq", "conv"), {"convert"}),
    (("hfseq", "fill"), {"fill-mask"}),
    (("hfseq", "convert", "--max"), {"--max_shard_size"}),
    (("hfseq", "convert", "--to", "m"), {"msgpack"}),
    (("hfseq", "completion", "z"), {"zsh"}),
    (("hfseq", "compare", "--x", ""), {"step", "tokens", "time"}),
    (("hfseq", "--vers"), {"--version"}),
]


@pytest.mark.parametrize(("words", "offered"), CASES)
@pytest.mark.parametrize("shell", [bash, fish])
def test_commands_flags_and_values_are_offered(scripts, shell, words, offered):
    assert set(shell(scripts, *words)) == offered


@pytest.mark.parametrize("shell", [bash, fish])
def test_every_command_is_offered(scripts, shell):
    completions = set(shell(scripts, "hfseq", ""))
    assert {name for name, *_ in cli.COMMANDS} <= completions


def test_bash_offers_files_where_files_are_wanted(scripts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run").mkdir()
    assert bash(scripts, "hfseq", "report", "my") == ["my-run"]
    assert bash(scripts, "hfseq", "report", "--plot", "my") == ["my-run"]


# The child immediately executes zsh, so JAX's warning about forks does not apply.
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_zsh_completes_at_its_prompt(scripts, tmp_path):
    need("zsh")
    pty = pytest.importorskip("pty")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.environ.update(PS1="> ", TERM="dumb")
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def wait_for(text: str) -> str:
        output, end = "", time.monotonic() + 30
        while text not in output and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                output += os.read(terminal, 65536).decode(errors="replace")
        assert text in output, output
        return output

    try:
        script = f'eval "$(<{scripts / "zsh"})"'
        setup = f"autoload -Uz compinit; compinit -u -D; {script}; echo rea''dy\n"
        os.write(terminal, setup.encode())
        wait_for("ready")
        for typed, expected in (
            ("hfseq conv\t", "hfseq convert "),
            ("--max\t", "--max_shard_size "),
            ("1GB --to m\t", "msgpack "),
        ):
            os.write(terminal, typed.encode())
            wait_for(expected)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_to_its_shell(scripts, shell):
    output(need(shell), "-n", str(scripts / shell))
