"""Kill -9 at random moments: nothing but unsaved steps is lost, and the end is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.training.conftest import losses

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 80


def start(flags: list[str], script: str) -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPTS / script), *flags]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def logged(folder: Path) -> int:
    try:
        return max(losses(folder), default=0)
    except (FileNotFoundError, ValueError):  # not begun, or a line is half written
        return 0


@pytest.mark.parametrize(
    ("script", "objective", "kills"),
    [
        ("run_mlm_flax.py", "mlm", 5),
        ("run_clm_flax.py", "clm", 1),
        ("run_t5_mlm_flax.py", "span_mlm", 1),
        ("run_bart_dlm_flax.py", "denoising", 1),
    ],
)
def test_kills_at_random_moments_change_nothing(flags, tmp_path, script, objective, kills):
    options = {"max_steps": STEPS, "save_steps": 7, "save_total_limit": 2, "eval_steps": 40}
    options["objective"] = objective
    whole = start(flags("whole", **options), script)
    output, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, output
    draw = random.Random(20261121)
    moments = sorted(draw.randint(1, STEPS - 1) for _ in range(kills))
    for moment in moments:
        run = start(flags("killed", **options), script)
        while run.poll() is None and logged(tmp_path / "killed") < moment:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
    last = start(flags("killed", **options), script)
    output, _ = last.communicate(timeout=600)
    assert last.returncode == 0, output
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
