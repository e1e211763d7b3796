"""The entry point that all scripts share.

It requests huge pages, validates the flags before jax is imported, shows the log, and converts
errors to exit codes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hfseq.errors import run_command
from hfseq.training import aot

#: Linux setting for 2 MB pages: always, madvise (on request) or never.
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TUNABLE = "glibc.malloc.hugetlb"


def train(
    objective: str | None, argv: Sequence[str] | None = None, program: str | None = None
) -> int:
    """Runs a training command: parses its flags, trains, and returns the exit code.

    jax is imported only after the flags have been validated.

    Args:
        objective: Name of the objective. `None` adds the flag `--objective NAME`.
        argv: The flags. Default: the flags of the command line.
        program: The command without the objective, for messages. Default: the name of the script.
    """

    def work() -> None:
        from hfseq.training.arguments import parse_with_objective

        name, arguments = parse_with_objective(argv, objective, program)

        from hfseq.training.run import main

        main(arguments, name)

    return run(work)


def run(main: Callable[[], int | None]) -> int:
    """Runs `main` as a program.

    On Linux, the program may restart itself once to request huge pages. The restarted program runs
    in the same process. A restart happens before jax is imported, and only if Python was started to
    run this program.

    Args:
        main: The function to run. Returns an exit code, or `None` for 0.

    Returns:
        The exit code.
    """
    aot.start_quietly()
    environment = with_huge_pages(os.environ)
    if environment is not None and is_main_program(sys.argv, sys.orig_argv):
        with contextlib.suppress(OSError):  # continue without huge pages
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return run_command(main, debug="--debug" in sys.argv, show_log=True)


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns environment variables that enable huge pages, or `None` for no change.

    On a CPU, each training step returns the memory of its large arrays to the operating system, so
    the arrays of the next step cause page faults again. Without huge pages, these page faults take
    a fifth of the training time of a small model. glibc 2.35 and later can use huge pages, but it
    reads the setting only when a process starts.

    The function returns `None` if huge pages are not available, if `GLIBC_TUNABLES` contains the
    setting already (e.g. `glibc.malloc.hugetlb=0`), or if `LD_PRELOAD` may load another allocator.

    Args:
        environ: The current environment variables.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if TUNABLE in tunables or environ.get("LD_PRELOAD"):
        return None
    name, version = platform.libc_ver()
    try:
        is_supported = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
        if not is_supported or "[madvise]" not in HUGE_PAGES_FILE.read_text():
            return None
    except (ValueError, OSError):
        return None
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, f"{TUNABLE}=1")))}


def is_main_program(argv: Sequence[str], started_with: Sequence[str]) -> bool:
    """Returns whether Python was started to run this script, without a debugger or profiler.

    Args:
        argv: The arguments of the script, `sys.argv`. In tests, in notebooks and with `runpy`, they
            differ from the end of the command line.
        started_with: The command line with which Python was started, `sys.orig_argv`.
    """
    same_words = list(started_with[-len(argv) :]) == list(argv)
    is_traced = sys.gettrace() is not None or sys.getprofile() is not None
    return bool(sys.executable) and same_words and not is_traced
