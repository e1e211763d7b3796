"""`python -m hfseq.v4 program.py ...` runs an unmodified program for Transformers 4.

The names and modules of Transformers 4 are available to the program. Otherwise the program runs as
with `python program.py ...`: as `__main__`, with its own arguments, its folder on the import path,
its exit code, and a traceback that starts in the program. `python -m hfseq.v4 -m module ...` runs a
module instead of a file.
"""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path
from types import ModuleType, TracebackType

USAGE = """usage: python -m hfseq.v4 (program.py | -m module) [argument ...]

Runs a program for Transformers 4 with the Flax classes of hfseq under their old names."""


def main(arguments: list[str]) -> None:
    """Runs the program or module that the first arguments name, with the remaining arguments."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    module = arguments[:1] == ["-m"]
    arguments = arguments[module:]
    if not arguments or not module and not Path(arguments[0]).is_file():
        problem = f"file '{arguments[0]}' not found" if arguments else "no program given"
        print(f"{USAGE}\n\npython -m hfseq.v4: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = arguments
    sys.excepthook = _report
    if module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        _run(Path(arguments[0]))


def _run(program: Path) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = str(program.resolve().parent)
    path = str(program.absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__file__ = path
    exec(code, vars(main_module))


def _report(
    error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Prints an error with a traceback that starts with the first stack frame of the program."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    sys.__excepthook__(error_type, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main(sys.argv[1:])
