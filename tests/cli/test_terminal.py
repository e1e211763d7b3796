"""Common behavior of all commands: colors, closed pipes, full disks, Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq import cli
from hfseq.cli import text as terminal
from tests.support.run_logs import records, write_log

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "hfseq.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("tty", "variables", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colors_require_a_terminal(monkeypatch, tty, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: tty)
    assert (terminal.colorize("x", "red") == "\033[31mx\033[0m") is coloured
    assert (terminal.colorize("x", "red") == "x") is not coloured


def test_a_reader_that_has_had_enough_ends_a_command_quietly(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "completion", "zsh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
    )
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_on_stdout_is_a_one_line_error(tmp_path):
    folder = write_log(tmp_path, records())
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*COMMAND, "report", str(folder)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    assert process.returncode == 1
    assert process.stderr == "error: [Errno 28] No space left on device\n"


def test_ctrl_c_is_one_word(tmp_path, monkeypatch, capsys):
    from hfseq.reports import log

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "RunLog", interrupt)
    assert cli.main(["report", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_every_help_has_an_example_and_imports_nothing_heavy():
    code = (
        "import sys; from hfseq import cli\n"
        "for command in cli.COMMANDS:\n"
        "    print('===', command[0])\n"
        "    try: cli.main([command[0], '--help'])\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "heavy = {'jax', 'flax', 'torch', 'transformers', 'numpy', 'matplotlib', 'tokenizers'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert process.returncode == 0, process.stderr
    helps = dict(text.split("\n", 1) for text in process.stdout.split("=== ")[1:])
    assert list(helps) == [command[0] for command in cli.COMMANDS]
    for name, text in helps.items():
        assert f"hfseq {name}" in text.split("examples:\n  ")[1]


def test_a_curve_takes_points_in_any_order():
    points = [(step, 3 / (step + 1)) for step in range(30)]
    assert terminal.draw_curve(points[::-1], 60) == terminal.draw_curve(points, 60)
    assert terminal.draw_curve([(9, 1.0), (4, 2.0), (6, 0.5)], 40)[-1].split() == ["4", "9"]


@pytest.mark.parametrize("largest", [1e308, 1.7e308, 1e-320, 5e-324])
def test_a_curve_of_numbers_at_the_limit_of_floats(largest):
    lines = terminal.draw_curve([(step, largest * (-1) ** step) for step in range(20)], 60)
    assert len(lines) == 9 and any(line.partition("│")[2] for line in lines)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_curve_skips_non_finite_values(value):
    points = [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert terminal.draw_curve([*points, (5, value), (value, 1.0)], 60) == terminal.draw_curve(
        points, 60
    )
    assert terminal.draw_curve([(1, value)], 60) == []
