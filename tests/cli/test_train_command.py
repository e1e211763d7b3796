"""``hfseq train``, ``tokenizer``, ``quickstart`` and ``combine``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from hfseq import cli, plugins
from hfseq.cli import quickstart, tokenizer
from hfseq.data.arguments import OBJECTIVES
from hfseq.training.arguments import parse, parse_with_objective
from hfseq.training.usage import ALIASES, USAGE, objective_name, summary, usage
from tests.support import plugin_files

project = plugin_files.project


def test_every_objective_has_a_usage_text_with_its_command():
    assert set(plugins.load().objectives) == set(USAGE)
    for name in USAGE:
        assert summary(name).endswith(".") and len(summary(name)) < 100
        assert f"hfseq train {name} --output_dir" in usage(name)
        assert "python scripts/x.py --output_dir" in usage(name, "python scripts/x.py")
        assert all(len(line) <= 100 for line in usage(name).splitlines())


@pytest.mark.parametrize("objective", USAGE)
def test_example_commands_parse(objective):
    text = usage(objective).replace("\\\n", " ")
    commands = re.findall(r"^    hfseq (train|tokenizer|combine)\b(.*)", text, flags=re.M)
    assert commands and any(name == "train" for name, _ in commands)
    for name, words in commands:
        argv = shlex.split(words)
        if name == "train":
            assert argv[0] == objective
            assert parse(argv[1:], objective=objective).training.output_dir
        elif name == "tokenizer":
            assert tokenizer.parse(argv)[0].output_dir
        else:
            assert cli.build_parser().parse_args([name, *argv]).output_dir


@pytest.mark.parametrize(
    "alias", ["ner", "qa", "t5_mlm", "bart_dlm", "clip", "captioning", "t5-mlm"]
)
def test_words_of_script_names_are_objectives(alias, project):
    name, arguments = parse_with_objective(["--output_dir", "x"], alias, "hfseq train")
    assert name == objective_name(alias) in OBJECTIVES
    assert type(arguments.data) is OBJECTIVES[name]
    assert arguments.command == f"hfseq train {alias} --output_dir x"


def test_aliases_are_unambiguous():
    assert not set(ALIASES) & set(USAGE) and set(ALIASES.values()) <= set(USAGE)


def test_list_names_objectives_aliases_and_plugins(project, capsys):
    assert cli.main(["train", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*USAGE, *ALIASES))
    assert all(len(line) <= 100 for line in text.splitlines())
    body = "@hookimpl\ndef register_objectives(register):\n    register('copying', 'x:y')\n"
    file = str(plugin_files.write(project / "mine.py", body))
    assert cli.main(["--plugin", file, "train", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1]["objective"] == "copying" and rows[-1]["plugin"] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "hfseq train --list"),
        (["train", "nerr"], "unknown objective 'nerr'"),
        (["train", "mlm", "--output_dir", "x", "--no_such_flag"], "--no_such_flag"),
        (
            ["train", "mlm", "--output_dir", "x", "--do_train", "True", "extra"],
            "unexpected positional argument extra",
        ),
        (["--plugin", "absent.py", "train", "--list"], "absent.py"),
        (["tokenizer", "--model_type", "roberta", "--output_dir", "x"], "--train_file"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(words, message, project, capsys):
    assert cli.main(words) in (1, 2)
    assert message in capsys.readouterr().err
    assert list(project.iterdir()) == []


def test_help_of_an_objective_does_not_import_jax(project):
    code = (
        "import sys; from hfseq import cli\n"
        "try: cli.main(['train', 'mlm', '--help'])\n"
        "except SystemExit: pass\n"
        "print('jax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "False", done.stderr
    assert "usage: hfseq train mlm [flags]" in done.stdout and "--mlm_probability" in done.stdout


def test_quickstart_stops_at_the_first_failed_step(project, capsys, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3 if "train" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(quickstart, "docstrings", lambda library: ["A text. " * 9])
    assert cli.main(["quickstart", "--output_dir", "demo", "--max_steps", "7"]) == 3
    assert [command[3] for command in commands] == ["tokenizer", "train"]
    assert commands[1][commands[1].index("--max_steps") + 1] == "7"
    assert "$ hfseq train mlm --output_dir demo/model" in capsys.readouterr().out
    assert (project / "demo" / "corpus.jsonl").stat().st_size > 300_000
