"""Lines in and lines out: bytes that may be no text, streams that may break, files kept whole."""

from __future__ import annotations

import codecs
import itertools
import os
import queue
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hfseq.errors import DataError, UsageError

#: What can be done with texts that are longer than the model reads.
LONG_LINE_POLICIES = ("truncate", "split", "error")

#: Bytes that are read at a time.
CHUNK_BYTES = 1 << 16


class BadLine(str):
    """A line that could not be read as it is; ``problem`` says why.

    ``usable`` lines, such as those with replaced bytes, are translated all the same.
    """

    problem: str
    usable: bool

    def __new__(cls, text: str, problem: str, usable: bool = False) -> BadLine:
        """Return ``text`` with what was wrong about it."""
        line = super().__new__(cls, text)
        line.problem, line.usable = problem, usable
        return line


def open_input(name: str) -> int:
    """Return a file descriptor for a path, or for standard input (``-``).

    **Raises:** UsageError for what cannot be read.
    """
    if name == "-":
        return sys.stdin.fileno()
    try:
        descriptor = os.open(name, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(21, "it is a directory")
    except OSError as error:
        raise UsageError(f"--input_file {name}: {error.strerror}") from None
    return descriptor


def read_lines(descriptor: int, name: str, replace: bool = False) -> Iterator[str]:
    """Yield the lines of UTF-8 text as soon as they are there, without their ends.

    Only ``\\n`` and ``\\r\\n`` end a line. What is no UTF-8 comes as a :class:`BadLine`, which with
    ``replace`` is usable. The descriptor is read without a lock, so that a thread which waits for
    input does not keep the program from ending.

    **Raises:** DataError for UTF-16 and UTF-32.
    """
    first, rest, ended = True, b"", False
    while not ended:
        chunk = os.read(descriptor, CHUNK_BYTES)
        ended = not chunk
        *lines, rest = (rest + chunk).split(b"\n")
        if ended and rest:
            lines.append(rest)
        for line in lines:
            if first and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(
                    f"{name}:1: this is UTF-16, not UTF-8: convert it first "
                    "(iconv -f UTF-16 -t UTF-8)"
                )
            line = (line.removeprefix(codecs.BOM_UTF8) if first else line).removesuffix(b"\r")
            first = False
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                problem = f"invalid UTF-8: byte 0x{byte:02x} at column {error.start + 1}"
                yield BadLine(line.decode("utf-8", "replace"), problem, usable=replace)


def count_lines(name: str) -> int | None:
    """Return how many lines a file has; ``None`` for what can be read only once."""
    if name == "-" or not os.path.isfile(name):
        return None
    count, last = 0, b"\n"
    with open(name, "rb") as file:
        while chunk := file.read(1 << 20):
            count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last != b"\n")


def read_windows(
    lines: Iterable[str], size: int, enough: int, pause: float | None
) -> Iterator[list[str]]:
    """Yield ``lines`` in lists of up to ``size``.

    With a ``pause`` (seconds) a thread reads ahead, and a list is handed out when ``enough`` lines
    wait or none has come for that long. An error of ``lines`` is raised after the lines before it.
    """
    window: list[str]
    if pause is None:
        iterator = iter(lines)
        while True:
            window = []
            try:
                window.extend(itertools.islice(iterator, size))  # keeps what came before an error
            except Exception:
                if window:
                    yield window
                raise
            if not window:
                return
            yield window

    waiting: queue.Queue[str | BaseException | None] = queue.Queue(maxsize=2 * size)
    stopped = threading.Event()

    def put(item: str | BaseException | None) -> None:
        """Wait for a place in the queue, as long as anybody reads it."""
        while not stopped.is_set():
            try:
                return waiting.put(item, timeout=0.5)
            except queue.Full:
                continue

    def read() -> None:
        end = None
        try:
            for line in lines:
                put(line)
                if stopped.is_set():
                    return
        except BaseException as error:  # raised where the lines are used
            end = error
        put(end)

    threading.Thread(target=read, daemon=True).start()
    try:
        item: str | BaseException | None = ""
        while isinstance(item, str):
            window = []
            while len(window) < size:
                try:
                    if not window:
                        item = waiting.get()
                    elif len(window) < enough:
                        item = waiting.get(timeout=pause)
                    else:
                        item = waiting.get_nowait()
                except queue.Empty:
                    break
                if not isinstance(item, str):
                    break
                window.append(item)
            if window:
                yield window
        if item is not None:
            raise item
    finally:
        stopped.set()


class Output:
    """Where lines go: standard output, or a file that takes its name when it is complete.

    Until then it is ``NAME.part``, which stays where the work is interrupted; what was under NAME
    is replaced only by a complete file. Pipes and devices are written to directly.
    """

    def __init__(self, name: str | None):
        self.name = None if name in (None, "-") else Path(str(name))
        self.lines = 0
        self._file: BinaryIO
        self._part: Path | None = None
        if self.name is not None and self.name.is_dir():
            raise UsageError(f"--output_file {self.name} is a directory: give a file")

    def __enter__(self) -> Output:
        """Open the file."""
        if self.name is None:
            self._file = sys.stdout.buffer
            return self
        if not self.name.exists() or self.name.is_file():
            self._part = self.name.with_name(f"{self.name.name}.part")
        try:
            self._file = open(self._part or self.name, "wb")
        except OSError as error:
            raise UsageError(f"--output_file {self.name}: {error.strerror}") from None
        return self

    def write(self, line: str) -> None:
        """Write a line, and hand it to whoever reads."""
        # A tokenizer can decode to a lone surrogate, which has no place in UTF-8.
        self._file.write(f"{line}\n".encode("utf-8", "replace"))
        self._file.flush()
        self.lines += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the file its name if nothing went wrong; else say where what is finished lies."""
        if self.name is None:
            return
        self._file.close()
        if self._part is None:
            return
        if kind is None:
            os.replace(self._part, self.name)
        elif self.lines:
            print(f"stopped: the first {self.lines} lines are in {self._part}", file=sys.stderr)
        else:
            self._part.unlink()
