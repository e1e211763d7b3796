"""What every script does around its work: huge pages, flags before jax, messages, exit codes."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hfseq.errors import run_command
from hfseq.training import aot

#: Where Linux says which memory may lie in pages of 2 MB: all, what asks for it, or none.
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TUNABLE = "glibc.malloc.hugetlb"


def train(objective: str | None, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Be a training script: parse its flags, train, and return the exit code.

    Without an ``objective`` it is a flag, ``--objective NAME``.
    ``description`` is the script's docstring, for ``--help``; the flags are the command line's
    unless ``argv`` has them. jax is imported when they are known to be good.
    """

    def work() -> None:
        from hfseq.training.arguments import parse, parse_with_objective

        if objective is None:
            name, arguments = parse_with_objective(argv, description)
        else:
            name, arguments = objective, parse(argv, description, objective)

        from hfseq.training.run import main

        main(arguments, name)

    return run(work)


def run(main: Callable[[], int | None]) -> int:
    """Run ``main`` as a program of its own; returns its exit code.

    On Linux the program may begin anew, as the same process, to ask for huge pages: before jax is
    imported, and only if nothing but it runs here.
    """
    aot.start_quietly()
    environment = with_huge_pages(os.environ)
    if environment is not None and is_main_program(sys.argv, sys.orig_argv):
        with contextlib.suppress(OSError):  # then it goes on as it is
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return run_command(main, debug="--debug" in sys.argv, show_log=True)


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return ``environ`` with glibc told to ask for huge pages, or None if it is of no use.

    A step on a CPU gives its large arrays back to the system, and those of the next one fault in
    again page by page: a fifth of the time of a small model. Only the environment that a process
    starts with can tell glibc (2.35 and later). A choice of the user's own, also
    ``glibc.malloc.hugetlb=0``, is left alone, and so is another allocator.
    """
    chosen = environ.get("GLIBC_TUNABLES", "")
    if TUNABLE in chosen or environ.get("LD_PRELOAD"):
        return None
    name, version = platform.libc_ver()
    try:
        able = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
        if not able or "[madvise]" not in HUGE_PAGES_FILE.read_text():
            return None
    except (ValueError, OSError):
        return None
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (chosen, f"{TUNABLE}=1")))}


def is_main_program(argv: Sequence[str], started_with: Sequence[str]) -> bool:
    """Tell whether Python was started for this script, and neither debugged nor profiled.

    Under a test, in a notebook or by ``runpy`` the words that Python was started with are others.
    """
    same_words = list(started_with[-len(argv) :]) == list(argv)
    watched = sys.gettrace() is not None or sys.getprofile() is not None
    return bool(sys.executable) and same_words and not watched
