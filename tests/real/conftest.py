"""Fixtures with pretrained checkpoints and synthesized speech."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real.checkpoints import CHECKPOINTS, DownloadError


@pytest.fixture(scope="session")
def checkpoint() -> Iterator[Callable[[str], Path]]:
    """Returns a function that returns the directory of a checkpoint in `CHECKPOINTS`.

    Tests are skipped without PyTorch, and if a package cannot be downloaded.
    """
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads slow down models of this size on a busy machine
    errors: dict[str, DownloadError] = {}
    with tempfile.TemporaryDirectory() as root:

        def write(name: str) -> Path:
            folder = Path(root, name)
            if name not in errors and not folder.exists():
                try:
                    CHECKPOINTS[name](folder)
                except DownloadError as error:
                    errors[name] = error
            if name in errors:
                pytest.skip(str(errors[name]))
            return folder

        yield write
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def speak(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that writes a WAV file of a spoken text. Requires espeak-ng."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is not installed (apt install espeak-ng)")
    pytest.importorskip("soundfile")
    folder = tmp_path_factory.mktemp("speech")

    def speak(text: str, voice: str = "en-us", speed: int = 160) -> Path:
        name = hashlib.sha256(f"{text}{voice}{speed}".encode()).hexdigest()
        path = folder / f"{name[:16]}.wav"
        command = [program, "-v", voice, "-s", str(speed), "-w", str(path), text]
        subprocess.run(command, check=True)
        return path

    return speak
