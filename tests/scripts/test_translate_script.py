"""``scripts/translate.py`` is ``hfseq translate`` with the spellings of another script besides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq import cli
from tests.support.translators import save_tiny_t5

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "translate.py"


def run(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'plugins'}"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_the_script_has_every_flag_of_the_command(capsys):
    try:
        cli.main(["translate", "--help"])
    except SystemExit:
        ours = set(re.findall(r"--[a-z_-]+", capsys.readouterr().out))
    done = run("--help")
    theirs = set(re.findall(r"--[a-z_-]+", done.stdout))
    assert done.returncode == 0 and theirs - ours == {"--checkpoint-file", "--english-query"}
    assert ours <= theirs


@pytest.mark.slow
def test_the_script_translates_as_the_command_does(tmp_path, capfd):
    save_tiny_t5(tmp_path)
    flags = ["--num_beams", "1", "--max_new_tokens", "15"]
    assert cli.main(["translate", str(tmp_path), "the cat", *flags]) == 0
    expected = capfd.readouterr().out
    done = run("--english-query", "the cat", "--checkpoint-file", tmp_path, *flags)
    assert (done.returncode, done.stdout) == (0, expected) and expected.strip()


@pytest.mark.slow
def test_script_errors_are_one_line():
    done = run("--num_beams", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no model: ") and done.stderr.count("\n") == 1
