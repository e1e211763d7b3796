"""Runs the code blocks of documentation pages."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from hfseq.cli.launch import free_port

ROOT = Path(__file__).resolve().parents[2]


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Returns language and code of the ``bash`` and ``python`` blocks of a page in order.

    Empty lines precede the code, so that the line numbers in errors are those of the page.
    """
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```(bash|python)\n(.*?)^```", text, flags=re.M | re.S)
    return [(match[1], "\n" * text[: match.start(2)].count("\n") + match[2]) for match in matches]


def shown_lines(page: Path) -> list[list[str]]:
    """Returns the lines of output that a page shows after each code block, before the next one.

    Output is an indented or ``text`` block. A ``text`` block that starts with a command is not.
    """
    text = page.read_text(encoding="utf-8")
    _, *parts = re.split(r"^```(?:bash|python)\n.*?^```", text, flags=re.M | re.S)
    lines_of_blocks = []
    for part in parts:
        blocks = [match[1] for match in re.finditer(r"^```text\n(.*?)^```", part, re.M | re.S)]
        indented = re.findall(
            r"^    (.+)", re.sub(r"^```.*?^```", "", part, flags=re.M | re.S), re.M
        )
        blocks = [block for block in blocks if not block.startswith(("python ", "hfseq "))]
        lines_of_blocks.append([*indented, *"".join(blocks).splitlines()])
    return lines_of_blocks


def run(page: Path, folder: Path, data: Path | str, shorten: bool = True) -> list[str]:
    """Runs the code blocks of a page in order.

    Args:
        page: The page.
        folder: The working directory of the shell blocks.
        data: The value of ``$DATA`` in shell blocks.
        shorten: Whether training commands are limited to four steps.

    Returns:
        The output of each block.
    """
    for name in ("scripts", "docs"):
        (folder / name).symlink_to(ROOT / name)
    names: dict = {}
    outputs = []
    for language, code in code_blocks(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, page.name, "exec"), names)
            outputs.append(output.getvalue())
        else:
            outputs.append(shell(shorten_code(code) if shorten else code, folder, data))
    return outputs


def shorten_code(code: str) -> str:
    """Limits the commands to four training steps and four evaluation examples."""
    code = re.sub(r'(--max_(?:eval|test|generate)_samples[= ]"?)\d+', r"\g<1>4", code)
    code = re.sub(r'--max_steps[= ]"?\d+"?', "--max_steps 4 --max_eval_samples 4", code)
    code = re.sub(r"--do_predict(?!.*--max_test)", "--do_predict --max_test_samples 4", code)
    code = re.sub(r'(--(?:logging|save|eval)_steps[= ]"?)\d+', r"\g<1>2", code)
    return re.sub(r'((?:warmup_steps|--num_runs)[:= ]+"?)\d+', r"\g<1>1", code)


def shell(code: str, folder: Path, data: Path | str) -> str:
    """Runs a shell block, asserts that it succeeds, and returns its output.

    Programs in the block use one device, unless the block sets XLA_FLAGS.
    """
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
    return f"{process.stdout}\n{process.stderr}"
