"""``python -m hfseq.v4 program.py …`` runs a program for Transformers 4 as it is.

hfseq is imported first, so the program finds the old names and modules. For the rest it runs as
``python program.py …`` would: as ``__main__``, with its own arguments and folder, its exit code
and a traceback that begins in it. ``-m module …`` runs a module.
"""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path
from types import ModuleType, TracebackType

USAGE = """usage: python -m hfseq.v4 (program.py | -m module) [argument ...]

Runs a program for Transformers 4 with hfseq's Flax classes under their old names."""


def main(arguments: list[str]) -> None:
    """Run the program that the first arguments name, with the others."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    module = arguments[:1] == ["-m"]
    arguments = arguments[module:]
    if not arguments or not module and not Path(arguments[0]).is_file():
        given = f"there is no file '{arguments[0]}'" if arguments else "name a program"
        print(f"{USAGE}\n\npython -m hfseq.v4: {given}", file=sys.stderr)
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
    found = sys.modules["__main__"] = ModuleType("__main__")
    found.__file__ = path
    exec(code, vars(found))


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an error without the frames that led to the program's first."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main(sys.argv[1:])
