"""Reads input line by line, and writes output files that appear only when they are complete."""

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
from typing import BinaryIO, TypeVar

from hfseq.errors import DataError, UsageError

T = TypeVar("T")

#: How to handle texts that are longer than the model supports.
LONG_LINE_POLICIES = ("truncate", "split", "error")

#: Bytes per read.
CHUNK_BYTES = 1 << 16


class BadLine(str):
    """A line with invalid bytes.

    Attributes:
        problem: Description of the invalid bytes.
        usable: Whether to process the line despite the problem. Its text then has replacement
            characters.
    """

    problem: str
    usable: bool

    def __new__(cls, text: str, problem: str, usable: bool = False) -> BadLine:
        """Creates a line from its text and the problem."""
        line = super().__new__(cls, text)
        line.problem, line.usable = problem, usable
        return line


def open_input(name: str) -> int:
    """Returns a file descriptor for a path, or for standard input (``-``).

    Raises:
        UsageError: The file cannot be read.
    """
    if name == "-":
        return sys.stdin.fileno()
    try:
        descriptor = os.open(name, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(21, "is a directory")
    except OSError as error:
        raise UsageError(f"--input_file {name}: {error.strerror}") from None
    return descriptor


def read_lines(descriptor: int, name: str, replace: bool = False) -> Iterator[str]:
    r"""Yields the lines of UTF-8 text as soon as they arrive, without their ends.

    Only ``\n`` and ``\r\n`` end a line. Lines with invalid UTF-8 are :class:`BadLine` objects. The
    descriptor is read directly, without the lock of a file object. A thread that waits for input
    thus does not block the exit of the program.

    Args:
        descriptor: File descriptor.
        name: Name of the input in messages.
        replace: Whether lines with invalid UTF-8 are usable, with replacement characters.

    Raises:
        DataError: The text is UTF-16 or UTF-32.
    """
    is_first, remainder, at_end = True, b"", False
    while not at_end:
        chunk = os.read(descriptor, CHUNK_BYTES)
        at_end = not chunk
        *lines, remainder = (remainder + chunk).split(b"\n")
        if at_end and remainder:
            lines.append(remainder)
        for line in lines:
            if is_first and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(
                    f"{name}:1: the text is UTF-16, not UTF-8. Convert it first "
                    "(iconv -f UTF-16 -t UTF-8)"
                )
            line = (line.removeprefix(codecs.BOM_UTF8) if is_first else line).removesuffix(b"\r")
            is_first = False
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                problem = f"invalid UTF-8: byte 0x{byte:02x} at column {error.start + 1}"
                yield BadLine(line.decode("utf-8", "replace"), problem, usable=replace)


def count_lines(name: str) -> int | None:
    """Returns the number of lines in a file, or ``None`` for input that can be read only once."""
    if name == "-" or not os.path.isfile(name):
        return None
    count, last_byte = 0, b"\n"
    with open(name, "rb") as file:
        while chunk := file.read(1 << 20):
            count, last_byte = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last_byte != b"\n")


def read_windows(
    lines: Iterable[T], size: int, min_lines: int, pause: float | None
) -> Iterator[list[T]]:
    """Yields ``lines`` in lists of up to ``size``.

    If the iterator raises an error, the lines before it are yielded first.

    Args:
        lines: The lines.
        size: Maximum number of lines per list.
        min_lines: With ``pause``, a list is yielded as soon as it has this many lines and no more
            are available at that time.
        pause: With ``pause``, a thread reads ahead, and a shorter list is yielded when no line has
            arrived for this many seconds. ``None`` waits for complete lists.
    """
    window: list[T]
    if pause is None:
        iterator = iter(lines)
        while True:
            window = []
            try:
                # The list keeps lines read before an error.
                window.extend(itertools.islice(iterator, size))
            except Exception:
                if window:
                    yield window
                raise
            if not window:
                return
            yield window

    # Lines are put in the queue as tuples. An error, or None, marks the end of the lines.
    pending: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=2 * size)
    stopped = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        """Adds an item, and waits while the queue is full and the consumer has not stopped."""
        while not stopped.is_set():
            try:
                return pending.put(item, timeout=0.5)
            except queue.Full:
                continue

    def read() -> None:
        end = None
        try:
            for line in lines:
                put((line,))
                if stopped.is_set():
                    return
        except BaseException as error:  # raised again by the consumer
            end = error
        put(end)

    threading.Thread(target=read, daemon=True).start()
    try:
        item: tuple[T] | BaseException | None = ()  # type: ignore[assignment]
        while isinstance(item, tuple):
            window = []
            while len(window) < size:
                try:
                    if not window:
                        item = pending.get()
                    elif len(window) < min_lines:
                        item = pending.get(timeout=pause)
                    else:
                        item = pending.get_nowait()
                except queue.Empty:
                    break
                if not isinstance(item, tuple):
                    break
                window.append(item[0])
            if window:
                yield window
        if item is not None:
            raise item
    finally:
        stopped.set()


def one_line(text: str) -> str:
    """Returns a text without line breaks, so that it is one line of a file."""
    return " ".join(text.split("\n")).replace("\r", " ").strip()


class Output:
    """Writes lines to standard output or to a file.

    A file has the name ``NAME.part`` until it is complete, and keeps this name if the program is
    interrupted. An existing file NAME is only replaced by a complete file. Pipes and devices are
    written to directly.

    Args:
        name: Path of the file. ``None`` and ``-`` write to standard output.
    """

    def __init__(self, name: str | None):
        self.name = None if name in (None, "-") else Path(str(name))
        self.lines = 0
        self._file: BinaryIO
        self._part: Path | None = None
        if self.name is not None and self.name.is_dir():
            raise UsageError(f"--output_file {self.name} is a directory, not a file")

    def __enter__(self) -> Output:
        """Opens the file."""
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
        """Writes and flushes a line."""
        # A tokenizer can decode to a lone surrogate, which UTF-8 cannot encode.
        self._file.write(f"{line}\n".encode("utf-8", "replace"))
        self._file.flush()
        self.lines += 1

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Renames the file after success, or reports the name of the incomplete file."""
        if self.name is None:
            return
        self._file.close()
        if self._part is None:
            return
        if error_type is None:
            os.replace(self._part, self.name)
        elif self.lines:
            print(f"stopped: the first {self.lines} lines are in {self._part}", file=sys.stderr)
        else:
            self._part.unlink()
