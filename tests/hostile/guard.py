"""Reads hostile files in a child process, which may crash, hang or exhaust its memory.

The child reports the start and the outcome of each case. The parent kills a child that takes too
long, records crashes, and starts another child after the case.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS, WAIT = 5.0, 90.0
START = 600.0  # for imports, and to create and read valid files on a busy machine


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: "refused" and "read" are expected, others are findings."""

    subject: str
    number: int
    how: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the outcome is expected."""
        return self.how in ("refused", "read")


def run(subjects: Sequence[str], first: int, count: int, folder: Path) -> Iterator[Outcome]:
    """Reads the cases ``first`` to ``first + count - 1`` of each subject; yields the outcomes."""
    todo = [(subject, number) for subject in subjects for number in range(first, first + count)]
    while todo:
        num_done = 0
        for outcome in _child(todo, folder):
            num_done += 1
            yield outcome
        todo = todo[num_done:]


def _child(todo: list[tuple[str, int]], folder: Path) -> Iterator[Outcome]:
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins"), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XLA_FLAGS": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "HFSEQ_CACHE": str(folder / "made" / "cache"),
        "MPLCONFIGDIR": str(folder / "made" / "matplotlib"),
        "JAX_PLATFORMS": "cpu",
        # The cache of the tests is outside the folder, where writes are findings.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "made" / "jax"),
    }
    command = [sys.executable, "-m", "tests.hostile.child", str(folder)]
    pipe = subprocess.PIPE
    with (
        (folder / "stderr").open("ab") as noise,
        subprocess.Popen(
            command, env=os.environ | variables, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=noise
        ) as child,
    ):
        assert child.stdin and child.stdout
        child.stdin.write(json.dumps(todo).encode() + b"\n")
        child.stdin.close()
        yield from _watch(child, todo)


def _watch(child: subprocess.Popen[bytes], todo: list[tuple[str, int]]) -> Iterator[Outcome]:
    """Yields the outcomes of one child, the last of which may be a crash."""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        buffer, current = b"", None
        while True:
            # The child measures CPU time; wall-clock time is longer on a busy machine.
            patience = START if current is None else WAIT
            if not selector.select(patience):
                child.kill()
                assert current, "the child never began"
                yield Outcome(*current, "hung", f"more than {WAIT:.0f} s")
                return
            chunk = os.read(child.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                word, *values = json.loads(line)
                if word == "begin":
                    current = (values[0], values[1])
                elif word == "end":
                    yield Outcome(*values)
                    current = None
                    if values[:2] == list(todo[-1]):
                        return
        code = child.wait()
        assert current, f"the child ended with {code} before it read anything"
        yield Outcome(*current, "crashed", f"exit code {code}")
