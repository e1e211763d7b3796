"""Reads hostile files and reports the outcome of each (see `tests.hostile.guard`)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile import subjects
from tests.hostile.command_subjects import COMPILING
from tests.hostile.guard import SECONDS

ALLOWANCE = 64 << 20  # bytes of memory in addition to twice the file size
#: Limits for subjects that compile programs.
COMPILING_SECONDS, COMPILING_ALLOWANCE = 60.0, 1 << 30
RUNS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "socket.connect",
    "socket.getaddrinfo",
    "pickle.find_class",
    "ctypes.dlopen",
)
MOVES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
    "shutil.rmtree",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Watch:
    """Records actions that must not happen while a file is read."""

    def __init__(self, folder: Path):
        self.inside, self.on, self.found = str(folder), False, ""
        sys.addaudithook(self)

    def __call__(self, event: str, values: tuple[Any, ...]) -> None:
        """Checks one audit event of the interpreter."""
        if not self.on or self.found:
            return
        if event in RUNS:
            self.found = f"{event} {values!r:.200}"
        elif event in MOVES and self._outside(values[0], values[-1]):
            self.found = f"{event} {values!r:.200}"
        elif event == "open" and values[2] & WRITES and self._outside(values[0]):
            self.found = f"wrote {values[0]!r}"
        elif event == "exec" and str(getattr(values[0], "co_filename", "")).startswith(self.inside):
            self.found = f"ran {values[0]!r:.200}"

    def _outside(self, path: Any, folder: Any = None) -> bool:
        if isinstance(path, int):
            return False
        path = os.fsdecode(path)
        if isinstance(folder, int) and folder > 2:  # the path is relative to a file descriptor
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        return not path.startswith((self.inside, "/dev/null", "/dev/shm", "/proc/self"))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records actions within the body."""
        self.on, self.found = True, ""
        try:
            yield
        finally:
            self.on = False


def memory(name: str) -> int:
    """Returns a value of /proc/self/status in bytes, or 0 if the file does not exist."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(text.partition(f"{name}:")[2].split()[0]) << 10


def forget_peak() -> None:
    """Resets the peak of the memory usage if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def read(subject: subjects.Subject, folder: Path, watch: Watch, size: int) -> tuple[str, str]:
    """Loads the files in ``folder`` and returns the outcome and a detail."""
    from hfseq.errors import HfseqError

    gc.collect()  # fast, because the objects before the first case are frozen
    forget_peak()
    memory_before, started = memory("VmRSS"), time.process_time()
    how, detail = "read", ""
    with watch.watching():
        try:
            subject.load(folder)
        except (HfseqError, OSError) as error:
            how, detail = "refused", str(error)
            if not detail.strip():
                how, detail = "mute", type(error).__name__
        except BaseException as error:  # any other exception is not a message for users
            how, detail = "escaped", f"{type(error).__name__}: {str(error)[:300]}"
    seconds, grown = time.process_time() - started, memory("VmHWM") - memory_before
    if watch.found:
        return "acted", watch.found
    compiles = subject.name in COMPILING
    if seconds > (COMPILING_SECONDS if compiles else SECONDS):
        return "slow", f"{seconds:.1f} s of computing; {how} {detail}"
    if grown > 2 * size + (COMPILING_ALLOWANCE if compiles else ALLOWANCE):
        return "swelled", f"{grown >> 20} MB for a file of {size} bytes; {how} {detail}"
    return how, detail[:300]


def send(*values: Any) -> None:
    """Sends a record to the parent."""
    os.write(out, json.dumps(values).encode() + b"\n")


def main() -> None:
    """Reads the cases from standard input and runs them."""
    root = Path(sys.argv[1])
    todo = json.loads(sys.stdin.buffer.readline())
    watch = Watch(root)
    for name in ("outside", "temporary"):
        (root / name).mkdir(exist_ok=True)
    tempfile.tempdir = str(root / "temporary")  # temporary files are allowed, but must be removed
    memory_before = sorted(os.listdir(root))
    created: dict[str, subjects.Subject] = {}
    for name, number in todo:
        if name not in created:
            created[name] = subjects.make(name, root / "made")
            created[name].write_files(empty_folder(root))
            # read the valid files first, which imports all modules
            created[name].load(root / "case")
            memory_before = sorted({*memory_before, "made", "case", "stderr"})
            gc.collect()
            gc.freeze()
        subject = created[name]
        size = subject.write_files(empty_folder(root), number)
        send("begin", name, number)
        how, detail = read(subject, root / "case", watch, size)
        left = {*os.listdir(root / "outside"), *os.listdir(root / "temporary")}
        strange = set(os.listdir(root)) - set(memory_before) or left
        if strange:
            how, detail = "wrote", str(strange)
        send("end", name, number, how, detail)


def empty_folder(root: Path) -> Path:
    """Returns an empty folder."""
    shutil.rmtree(root / "case", ignore_errors=True)
    (root / "case").mkdir()
    return root / "case"


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not reach the parent
    main()
