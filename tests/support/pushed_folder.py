"""A model folder of a training run, and the files of it that belong on the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub

README = "---\nlicense: apache-2.0\n---\n# a model\n"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A complete model folder that also contains files that must not be pushed."""
    root = tmp_path / "model"
    files = {
        "config.json": b'{"model_type": "bert"}',
        "README.md": README.encode(),
        "model.safetensors": b"weights" * 1000,
        "runs/nov21_host/events.out.tfevents.1": b"events",
        "checkpoint-10/optimizer.msgpack": b"big",
        "checkpoints/20/state/array": b"big",
        "previous-20261121/model.safetensors": b"old",
        ".cache/tokens.bin": b"cache",
        "wandb/run/files": b"private",
        "model.safetensors.tmp": b"half",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


PUSHED = {
    "config.json",
    "README.md",
    "model.safetensors",
    "runs/nov21_host/events.out.tfevents.1",
}


def commits(hub: FakeHub, name: str = "user/m") -> list[str]:
    return [commit.title for commit in hub.repo(name).history()]


def push_in_subprocess(folder: Path, timeout: float, setup: str = "") -> str:
    """Pushes in a separate process, which must end; returns the result of ``finish``.

    ``setup`` is code that runs before the push and can use the module ``hub``.
    """
    code = (
        f"import sys, time; from hfseq.checkpoints import hub; {setup}\n"
        "pusher = hub.BackgroundPusher(sys.argv[1], 'user/m'); pusher.push('last')\n"
        f"print(pusher.finish(timeout={timeout}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
