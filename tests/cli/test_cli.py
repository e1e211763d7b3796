"""The ``hfseq`` command."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import hfseq
from hfseq import cli, plugins
from hfseq.cli import project as environment
from tests.support import plugin_files

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
HEAVY = {"jax", "flax", "torch", "transformers", "datasets", "numpy"}


project = plugin_files.project


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def python(code: str, *arguments: str) -> str:
    """Runs ``code`` in a new interpreter and returns its output."""
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def broken(path: Path) -> Path:
    path.write_text("import no_such_module_here")
    return path


@pytest.mark.parametrize("arguments", [["plugins"], ["env", "--no_devices"], ["new", "my-model"]])
def test_a_command_imports_no_heavy_module(arguments, project):
    code = (
        "import sys; from hfseq import cli; status = cli.main(sys.argv[1:]);"
        f"heavy = {HEAVY!r} & sys.modules.keys(); assert not heavy, heavy; sys.exit(status)"
    )
    python(code, *arguments)


def test_help_imports_no_heavy_module_and_has_examples():
    code = (
        "import sys; from hfseq import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"assert not {HEAVY!r} & sys.modules.keys()"
    )
    printed = python(code)
    for text in ("env", "plugins", "new", "examples:", "hfseq new my-encoder"):
        assert text in printed


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--version")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hfseq {hfseq.__version__}\n"


def test_no_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2


def test_every_command_and_flag_is_documented():
    parser = cli.build_parser()
    (commands,) = (a for a in parser._actions if a.dest == "==SUPPRESS==" or a.choices)
    for name, command in commands.choices.items():
        assert f"## hfseq {name}" in GUIDE
        for action in command._actions:
            if action.help != argparse.SUPPRESS:
                for flag in action.option_strings:
                    assert flag in ("-h", "--help") or f"`{flag}" in GUIDE, flag


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        ("fill-mask DIR TEXT --top 3", "top_k", 3),
        ("generate DIR --whole", "whole_input", True),
        ("transcribe DIR FILE --wrong_rate report", "on_rate_mismatch", "report"),
        ("env --no-devices", "no_devices", True),
    ],
)
def test_earlier_flag_names_are_accepted_and_hidden(words, dest, value, capsys):
    arguments = cli.build_parser().parse_args(words.split())
    assert getattr(arguments, dest) == value
    command, old_name = words.split()[0], next(w for w in words.split() if w.startswith("--"))
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert not re.search(rf"{old_name}(?![\w-])", capsys.readouterr().out)


# -- env -------------------------------------------------------------------------------------------


def test_env_prints_versions_plugins_and_devices(capsys):
    assert run("env") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["hfseq"] == hfseq.__version__
    assert rows["transformers"].startswith("5.")
    assert "bert" in rows["plugins"]
    assert rows["device"].startswith("cpu:")


def test_env_as_json(capsys):
    assert run("env", "--json", "--no_devices") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["jax"] and "bert" in report["plugins"]
    assert report["errors"] == {} and "devices" not in report


def test_env_shows_broken_plugins_and_missing_packages(capsys, project, monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    plugin_files.write_project_file(project, "import no_such_module_here")
    assert run("env", "--no_devices") == 0
    output = capsys.readouterr().out
    assert "no-such-package   not installed" in output
    assert "broken plugin" in output and "no_such_module_here" in output


def test_env_survives_jax_that_cannot_start(capsys, monkeypatch):
    import jax

    monkeypatch.setattr(jax, "devices", lambda: 1 / 0)
    assert run("env") == 0
    assert "none (ZeroDivisionError: division by zero)" in capsys.readouterr().out


# -- plugins ---------------------------------------------------------------------------------------


def test_plugins_lists_what_each_adds(capsys):
    assert run("plugins") == 0
    output = capsys.readouterr().out
    assert f"roberta (hfseq {hfseq.__version__})\n  architectures: roberta\n" in output
    assert "  optimizers: " in output


def test_plugins_as_json(capsys, project):
    (project / "mine.py").write_text(
        "from hfseq import hookimpl\n\n@hookimpl\ndef load_dataset(name):\n    return None\n"
    )
    assert run("plugins", "--json", "--plugin", "mine.py") == 0
    report = json.loads(capsys.readouterr().out)
    mine = next(row for row in report["plugins"] if row["name"] == "mine")
    assert mine == {
        "name": "mine",
        "origin": str((project / "mine.py").resolve()),
        "version": None,
        "hooks": ["load_dataset"],
        "adds": {},
    }


def test_a_broken_plugin_is_listed_and_the_command_succeeds(capsys, project):
    plugin_files.write_project_file(project, "import no_such_module_here")
    assert run("plugins") == 0
    captured = capsys.readouterr()
    assert "error: plugin 'hfseqfile'" in captured.out and "no_such_module_here" in captured.out
    assert "bert" in captured.out and captured.err == ""


def test_plugin_files_count_before_and_after_the_command(capsys, project):
    for name in ("one", "two"):
        (project / f"{name}.py").write_text(
            "from hfseq import hookimpl\n\n@hookimpl\ndef load_dataset(name):\n    return None\n"
        )
    assert run("--plugin", "one.py", "plugins", "--plugin", "two.py") == 0
    output = capsys.readouterr().out
    assert "one (" in output and "two (" in output and "  load_dataset\n" in output


def test_a_named_plugin_that_is_broken_is_one_line_and_exit_code_1(capsys, project):
    assert run("plugins", "--plugin", str(broken(project / "bad.py"))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: plugin 'bad'") and "no_such_module_here" in line


def test_debug_shows_the_traceback(capsys, project):
    for arguments in (["--debug", "plugins"], ["plugins", "--debug"]):
        assert run(*arguments, "--plugin", str(broken(project / "bad.py"))) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback") and "hfseq.errors.PluginError: " in shown


# -- new -------------------------------------------------------------------------------------------


def command_flags() -> dict[str, dict[str, argparse.Action]]:
    """Returns the flags that the help of each command shows."""
    (commands,) = (
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {action.option_strings[0]: action for action in sub._actions if action.option_strings}
        for name, sub in commands.choices.items()
    }


#: Flags of commands that run a model, and the commands that cannot have them.
SHARED = {
    "precision": (),
    "device": (),
    "json": (),
    "output_file": (),
    "batch_size": ("chat",),
    "disable_tqdm": ("chat",),
}
GENERATING = ("generate", "translate", "transcribe", "caption", "summarize")


def test_commands_that_run_a_model_have_the_same_flags():
    flags = command_flags()
    running = [name for name, own in flags.items() if "--device" in own]
    assert len(running) == 16
    for flag, without in SHARED.items():
        assert {name for name in running if f"--{flag}" not in flags[name]} == set(without), flag
    for flag in ("num_beams", "max_new_tokens"):
        assert all(f"--{flag}" in flags[name] for name in GENERATING)


def test_a_flag_has_one_definition_in_all_commands():
    sampling = ("generate", "chat")
    for flag in (*SHARED, "num_beams", "max_new_tokens", "top_k", "seed", "input_file"):
        definitions = {
            (
                name in sampling and flag == "top_k",  # as in GenerationConfig
                type(action).__name__,
                action.type,
                tuple(action.choices or ()),
                action.metavar,
            )
            for name, own in command_flags().items()
            if (action := own.get(f"--{flag}")) and name not in ("plan", "combine")
        }
        assert len(definitions) == 1 + (flag == "top_k"), definitions


def test_training_flags_have_the_names_and_choices_of_the_commands():
    from hfseq.training.arguments import DeviceName, ModelArguments, TrainingArguments

    choices = get_args(get_args(DeviceName)[0])
    assert {*choices} == {*command_flags()["generate"]["--device"].choices}
    training = {item.name for item in fields(TrainingArguments)}
    assert {"device", "disable_tqdm", "seed"} <= training
    assert "precision" in {item.name for item in fields(ModelArguments)}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["caption", "m", "x.png", "--no_progress"], "disable_tqdm", True),
        (["fill-mask", "m", "x", "--top", "3"], "top_k", 3),
        (["evaluate", "m", "--tasks", "x", "--output", "r.json"], "output_file", "r.json"),
        (["new", "x", "--output", "y.py"], "output_file", "y.py"),
    ],
)
def test_an_earlier_spelling_is_accepted_but_not_shown(arguments, name, value):
    assert getattr(cli.build_parser().parse_args(arguments), name) == value
    old = next(word for word in arguments[2:] if word.startswith("--") and word != "--tasks")
    assert old not in command_flags()[arguments[0]]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("classify", "top_k"),
        ("caption", "batch_size"),
        ("translate", "num_beams"),
        ("transcribe", "max_new_tokens"),
        ("generate", "num_return_sequences"),
    ],
)
def test_a_count_below_one_is_wrong_usage(command, flag, capsys):
    assert run(command, "model", "input", f"--{flag}", "0") == 2
    assert f"--{flag} 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_new_writes_a_plugin_that_is_found(capsys, project):
    assert run("new", "my-encoder") == 0
    assert capsys.readouterr().out.startswith("wrote my_encoder.py")
    assert run("plugins", "--plugin", "my_encoder.py") == 0
    assert "  architectures: my-encoder\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", environment.TEMPLATE_KINDS)
def test_new_writes_an_architecture_that_passes_the_battery(kind, project):
    from hfseq.testing import check_architecture
    from hfseq.testing import fresh as testing_fresh
    from hfseq.testing import torch as testing_torch

    assert run("new", "tiny-bird", "--kind", kind, "--output_file", "bird.py") == 0
    spec = plugins.load(["bird.py"]).architectures.get("tiny-bird")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {} if kind == "state" else {"max_position_embeddings": 32}
    config = spec.load_config()(**sizes)
    assert config.model_type == "tiny-bird"
    is_decoder = kind in ("decoder", "state")
    quick = {"heads": ["ForCausalLM"]} if is_decoder else {}
    report = check_architecture("tiny-bird", config, **quick)
    # Skipped checks: PyTorch has no such class, and encoders have no cache.
    allowed = {check.__name__ for check in (*testing_torch.CHECKS, *testing_fresh.CHECKS)}
    allowed |= {"cached_decoding"} if kind == "encoder" else set()
    allowed |= {"generation"} if not is_decoder else set()
    allowed |= {"long_rows"} if kind == "state" else set()
    assert {label.rpartition(".")[2] for label in report.skipped} == allowed


@pytest.mark.parametrize("kind", environment.TEMPLATE_KINDS)
def test_new_keeps_to_the_house_style(kind, project):
    assert run("new", "my-model", "--kind", kind) == 0
    text = (project / "my_model.py").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100
    assert "$" not in text
    compile(text, "my_model.py", "exec")


def test_new_never_overwrites_a_file(capsys, project):
    (project / "my_encoder.py").write_text("mine")
    assert run("new", "my-encoder") == 2
    assert "'my_encoder.py' already exists" in capsys.readouterr().err
    assert (project / "my_encoder.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["My", "1st", "a b", "../x", "-x", ""])
def test_new_refuses_a_name_that_is_not_a_model_type(name, capsys, project):
    assert cli.main(["new", "--", name]) == 2
    assert f"'{name}'" in (error := capsys.readouterr().err) and "model type" in error
    assert not list(project.iterdir())


def test_new_rejects_an_existing_name(capsys):
    assert run("new", "bert") == 2
    assert "plugin 'bert' already registers 'bert'" in capsys.readouterr().err


def test_new_rejects_a_missing_folder(capsys):
    assert run("new", "x", "--output", "nowhere/x.py") == 1
    assert "nowhere/x.py" in capsys.readouterr().err
