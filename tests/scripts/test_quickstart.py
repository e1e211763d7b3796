"""The two commands of the README: the corpus of the quickstart, and the scripts around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
COMMANDS = [SCRIPTS / "quickstart.sh", SCRIPTS / "test.sh", ROOT / ".ci" / "run"]

from hfseq.cli import quickstart


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("quickstart") / "new" / "corpus.jsonl"
    quickstart.write_corpus(path)
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_the_corpus_is_prose_enough_to_learn_from(corpus):
    assert sum(map(len, corpus)) > 1_000_000
    assert len(set(corpus)) == len(corpus)
    assert any('The "for" statement' in text for text in corpus)
    assert any(text.startswith("Return True if") for text in corpus)
    assert not any("  " in text or "\n" in text or "====" in text for text in corpus)


@pytest.mark.slow
def test_the_corpus_is_the_same_every_time(corpus, tmp_path):
    quickstart.write_corpus(tmp_path / "again.jsonl")
    lines = (tmp_path / "again.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == corpus


@pytest.mark.slow
def test_writing_the_corpus_runs_no_module_of_the_standard_library(tmp_path):
    code = (
        "import sys; sys.argv = ['x', sys.argv[1]]\n"
        "import pathlib; from hfseq.cli import quickstart\n"
        "quickstart.write_corpus(pathlib.Path(sys.argv[1]))\n"
        "print(*{'antigravity', 'this', 'idlelib', 'turtle', 'tkinter'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "c.jsonl"],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[1:] == [""], done.stderr


@pytest.mark.slow
def test_json_is_the_only_standard_output(tmp_path):
    command = [sys.executable, "-m", "hfseq.cli", "quickstart", "--json", "--max_steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == ["tokenizer", "train", "fill-mask"]
    assert result["train"]["steps"] == 2 and len(result["fill-mask"]) == 3
    assert "$ hfseq train mlm" in done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_a_command_is_valid_bash(command):
    subprocess.run(["bash", "-n", command], check=True)
    assert "set -euo pipefail" in command.read_text()


def fake(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


OLD = "if [[ $1 == --version ]]; then echo Python 3.9.2; else exit 1; fi"


def run(script: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run shell code in a checkout with nothing but the standard tools on the path."""
    environment = {"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "HOME": str(checkout), **variables}
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout without hfseq's code, and a Python whose pip writes down what it is asked for."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "test.sh"):
        (tmp_path / "scripts" / name).write_text((SCRIPTS / name).read_text())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    return tmp_path


def environment(folder: Path) -> Path:
    """A virtual environment that records calls of ``python -m`` in ``calls``."""
    code = (
        f'if [[ $1 == -m ]]; then echo "$@" >>{folder.parent}/calls; exit ${{FAIL:-0}}; fi\n'
        f'if [[ $2 == *prefix* ]]; then echo {folder}; else exec {sys.executable} "$@"; fi'
    )
    fake(folder / "bin" / "python", code)
    return folder


def test_an_old_python_is_a_clear_message(checkout):
    for name in ("python3", "python", "python3.11", "python3.12", "python3.13"):
        fake(checkout / "bin" / name, OLD)
    done = run("bash scripts/test.sh", checkout)
    assert done.returncode == 1
    assert "Python 3.11 or newer, but python3 is Python 3.9.2" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_active_environment_is_a_clear_message(checkout):
    fake(checkout / "old" / "bin" / "python", OLD)
    done = run("bash scripts/test.sh", checkout, VIRTUAL_ENV=str(checkout / "old"))
    assert done.returncode == 1
    assert f"the active environment {checkout / 'old'} does not have Python 3.11" in done.stderr


def test_newer_python_is_found_if_python3_is_too_old(checkout):
    fake(checkout / "bin" / "python3", OLD)
    newer = fake(checkout / "bin" / "python3.13", f'exec {sys.executable} "$@"')
    done = run("source scripts/environment.sh; find_python", checkout)
    assert done.stdout.strip() == str(newer)


def test_the_active_environment_is_used_and_installed_into_once(checkout):
    active = environment(checkout / "active")
    for arguments in ("-k one", "tests/data"):
        done = run(f"bash scripts/test.sh {arguments}", checkout, VIRTUAL_ENV=str(active))
        assert done.returncode == 0, done.stderr
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["pip", "pytest", "pytest"]
    assert calls[0].endswith("--editable .[test]")
    workers = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    given = [call.split()[2:] for call in calls[1:]]
    assert given == [[*workers, "-k", "one"], [*workers, "tests/data"]]
    assert not (checkout / ".venv").exists()


def test_a_changed_setup_is_installed_again(checkout):
    active = environment(checkout / "active")
    run("bash scripts/test.sh", checkout, VIRTUAL_ENV=str(active))
    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    run("bash scripts/test.sh", checkout, VIRTUAL_ENV=str(active))
    assert (checkout / "calls").read_text().count("pip install") == 2


def test_a_failure_is_the_exit_code(checkout):
    active = environment(checkout / "active")
    done = run("bash scripts/test.sh", checkout, VIRTUAL_ENV=str(active), FAIL="3")
    assert done.returncode == 3
    assert not list(active.glob(".hfseq-*")), "a failed installation must not count as done"


@pytest.mark.slow
@pytest.mark.skipif(not os.access(ROOT, os.W_OK), reason="needs a checkout")
def test_environment_is_created_if_none_is_active(checkout):
    script = (
        f"PYTHON={sys.executable}; source scripts/environment.sh; find_environment; echo $PYTHON"
    )
    done = run(script, checkout)
    assert done.stdout.splitlines()[-1] == ".venv/bin/python", done.stderr
    assert (checkout / ".venv" / "bin" / "pip").exists()
