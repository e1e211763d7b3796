"""`hfseq launch`: several processes of one run on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hfseq import cli
from hfseq.cli import launch

SCRIPT = """
import os, signal, sys, time
number, count = os.environ["PROCESS_ID"], os.environ["NUM_PROCESSES"]
print(number, "of", count, "at", os.environ["COORDINATOR_ADDRESS"], *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(number) + 40))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(int(number) + 50))
    print("ready", flush=True)
    time.sleep(60)
if number == "1" and "fail" in sys.argv:
    sys.exit(7)
if number == "1" and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return path


def start(script, *words):
    command = [sys.executable, "-m", "hfseq.cli", "launch", "--num_processes", "2", str(script)]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_get_their_number_and_a_common_address(script):
    running = start(script, "--flag", "x")
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert output.startswith("0 of 2 at localhost:") and output.endswith(" --flag x\n")
    assert errors == "[1] " + output.replace("0 of 2", "1 of 2")


@pytest.mark.parametrize(("word", "code"), [("fail", 7), ("die", 128 + signal.SIGKILL)])
def test_exit_code_is_that_of_the_first_failed_process(script, word, code):
    running = start(script, word)
    running.communicate(timeout=60)
    assert running.returncode == code


def test_first_signal_reaches_process_0_and_the_others_are_stopped(script, monkeypatch):
    running = start(script, "wait")
    assert running.stdout.readline() and running.stdout.readline() == "ready\n"
    while "ready" not in running.stderr.readline():
        pass
    running.send_signal(signal.SIGINT)
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)  # the second one reaches all
    running.communicate(timeout=60)
    assert running.returncode == 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes", "0", "train", "mlm"], "--num_processes 0"),
        (["--num_processes", "2"], "no program"),
        (["--num_processes", "2", "missing.py"], "missing.py"),
        (["--num_processes", "2", "train", "mlm", "--process_id=1"], "--process_id=1"),
    ],
)
def test_wrong_usage_starts_nothing(words, message, capsys):
    assert cli.main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_gpus_are_divided_among_the_processes(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(8)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.divide_gpus(4) == ["0,1", "2,3", "4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert launch.divide_gpus(2) == ["0", "1"]
    with pytest.raises(launch.UsageError, match="--num_processes 4: this machine has 2 GPUs"):
        launch.divide_gpus(4)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert launch.divide_gpus(4) == []
