"""Runs the code blocks of documentation pages."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Returns language and code of the ``bash`` and ``python`` blocks of a page in order.

    The code starts with empty lines, so that its line numbers are those of the page.
    """
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```(bash|python)\n(.*?)^```", text, flags=re.M | re.S)
    return [(match[1], "\n" * text[: match.start(2)].count("\n") + match[2]) for match in matches]


def run(page: Path, folder: Path, data: Path | str, shorten: bool = True) -> dict:
    """Runs the blocks of a page in ``folder`` and returns the Python namespace.

    ``shorten`` limits trainings to four steps. ``$DATA`` is ``data``.
    """
    for name in ("scripts", "docs"):
        (folder / name).symlink_to(ROOT / name)
    names: dict = {}
    for language, code in code_blocks(page):
        if language == "python":
            exec(compile(code, page.name, "exec"), names)
        else:
            shell(shorten_code(code) if shorten else code, folder, data)
    return names


def shorten_code(code: str) -> str:
    """Limits the commands to four training steps and few evaluation examples."""
    code = re.sub(r'(--max_(?:eval|test|generate)_samples[= ]"?)\d+', r"\g<1>4", code)
    code = re.sub(r'--max_steps[= ]"?\d+"?', "--max_steps 4 --max_eval_samples 4", code)
    code = re.sub(r"--do_predict(?!.*--max_test)", "--do_predict --max_test_samples 4", code)
    code = re.sub(r'(--(?:logging|save|eval)_steps[= ]"?)\d+', r"\g<1>2", code)
    return re.sub(r'((?:warmup_steps|--num_runs)[:= ]+"?)\d+', r"\g<1>1", code)


def free_port() -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def shell(code: str, folder: Path, data: Path | str) -> None:
    """Runs a shell block on one device unless it sets XLA_FLAGS. A failure shows its output."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "DATA": str(data),
        "PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, f"{code.strip()}\n{process.stdout}\n{process.stderr}"
    if os.environ.get("HFSEQ_SHOW_PAGES"):
        print(process.stdout, process.stderr, sep="\n")
