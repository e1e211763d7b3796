"""The output directory of a training run, and the files in it that belong on the Hub."""

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
    """An output directory that also contains files that must not be pushed to the Hub."""
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
    """Pushes a folder in a separate process, and asserts that the process exits normally.

    Args:
        folder: The folder to push.
        timeout: The timeout of ``BackgroundPusher.finish`` in seconds.
        setup: Code that runs before the push. It can use the module ``hub``.

    Returns:
        The output of the process, which is the result of ``finish``.
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
