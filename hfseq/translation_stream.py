"""Windows of lines: full ones from files, and from a stream whatever has come when it pauses."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

#: What can be done with texts that are longer than the model reads.
LONG_LINES = ("truncate", "split", "error")


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


def windows(
    lines: Iterable[str], size: int, enough: int, pause: float | None
) -> Iterator[list[str]]:
    """Yield ``lines`` in lists of up to ``size``.

    With a ``pause`` (seconds) a thread reads ahead, and a list is handed out when ``enough`` lines
    wait or none has come for that long. An error of ``lines`` is raised after the lines before it.
    """
    if pause is None:
        yield from _full(iter(lines), size)
        return
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2 * size)
    stopped = threading.Event()
    reader = threading.Thread(target=_read, args=(lines, waiting, stopped), daemon=True)
    reader.start()
    try:
        ended = False
        while not ended:
            window, ended, error = _collect(waiting, size, enough, pause)
            if window:
                yield window
            if error is not None:
                raise error
    finally:
        stopped.set()


def _full(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    while True:
        window: list[str] = []
        try:
            window.extend(itertools.islice(lines, size))  # keeps what came before an error
        except Exception:
            if window:
                yield window
            raise
        if not window:
            return
        yield window


_END = object()


def _read(lines: Iterable[str], waiting: queue.Queue[Any], stopped: threading.Event) -> None:
    try:
        for line in lines:
            if not _put(line, waiting, stopped):
                return
        _put(_END, waiting, stopped)
    except BaseException as error:  # raised where the lines are used
        _put(error, waiting, stopped)


def _put(item: Any, waiting: queue.Queue[Any], stopped: threading.Event) -> bool:
    """Wait for a place in the queue; False where nobody reads any more."""
    while not stopped.is_set():
        try:
            waiting.put(item, timeout=0.5)
            return True
        except queue.Full:
            continue
    return False


def _collect(
    waiting: queue.Queue[Any], size: int, enough: int, pause: float
) -> tuple[list[str], bool, BaseException | None]:
    """Return lines, whether they were the last, and the error that ended them."""
    window: list[str] = []
    while len(window) < size:
        try:
            if not window:
                item = waiting.get()
            else:
                item = waiting.get(timeout=pause) if len(window) < enough else waiting.get_nowait()
        except queue.Empty:
            return window, False, None
        if item is _END or isinstance(item, BaseException):
            return window, True, item if isinstance(item, BaseException) else None
        window.append(item)
    return window, False, None
