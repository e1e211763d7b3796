"""When the network hangs: transfers that are left once nothing moves.

``huggingface_hub`` and the file systems of ``fsspec`` may wait for ever, or try again for very
long. So they are called in a thread, which is left to itself when no bytes have moved for
``patience`` seconds: a slow large upload is never cut.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from hfseq.errors import CheckpointError

T = TypeVar("T")

#: Seconds without a byte moving after which a transfer hangs; ``--hub_timeout`` sets ``patience``.
stall_timeout = DEFAULT_STALL_TIMEOUT = 600.0

#: Bytes; fewer are no progress: a question asked again, an answer that drips.
MIN_PROGRESS_BYTES = 1 << 14


class TransferStalled(CheckpointError):
    """Nothing has moved over the network for so long that a transfer was left."""


_ignored: frozenset[str] = frozenset()


def ignore_open_connections() -> None:
    """Count what moves on later connections only: processes of a run always talk to each other."""
    global _ignored
    _ignored = frozenset(_connections())


class TrafficMonitor:
    """What the TCP connections of this process move.

    Where the system does not tell (other than Linux), nothing ever moves.
    """

    def __init__(self) -> None:
        self._known = _connections()
        self._since, self._moved = time.monotonic(), 0

    def idle_seconds(self) -> float:
        """Return the seconds since bytes have moved, or since this began; to be asked often."""
        connections = _connections()
        for name in connections.keys() - _ignored:
            self._moved += max(0, connections[name] - self._known.get(name, 0))
        self._known = connections
        if self._moved >= MIN_PROGRESS_BYTES:
            self._since, self._moved = time.monotonic(), 0
        return time.monotonic() - self._since


def _connections() -> dict[str, int]:
    """Return the bytes that each connection has had acknowledged and received (``tcp(7)``)."""
    moved = {}
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            link = os.readlink(f"{folder}/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                moved[link] = sum(struct.unpack_from("=QQ", info, 120))
        except (OSError, struct.error):  # it was closed meanwhile, or is none of TCP
            continue
    return moved


def wait_for_transfer(thread: threading.Thread, seconds: float, traffic: TrafficMonitor) -> bool:
    """Wait for a daemon thread; leave it, and return False, once it has been silent for so long."""
    try:
        while thread.is_alive():
            thread.join(min(1.0, seconds / 10))
            if thread.is_alive() and traffic.idle_seconds() > seconds:
                _leave(thread)
                return False
    except BaseException:  # a signal
        _leave(thread)
        raise
    return True


def is_abandoned() -> bool:
    """Tell whether nobody waits any more for the thread that asks."""
    return threading.current_thread() in _LEFT


_LEFT: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _leave(thread: threading.Thread) -> None:
    """Let the process end although a daemon thread is at work.

    Uploads of several files have a pool of threads. Those are daemons, as the thread that began
    them is, and yet Python waits for them in the end.
    """
    from concurrent.futures import thread as pools

    _LEFT.add(thread)
    queues = getattr(pools, "_threads_queues", {})
    for worker in list(queues):
        if worker.daemon:
            queues.pop(worker, None)


def run_with_stall_timeout(call: Callable[[], T], seconds: float | None = None) -> T:
    """Return ``call()``, made in a thread of its own.

    **Raises:** Stalled when no bytes have moved for ``seconds``, by default ``patience``.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="hfseq-transfer", daemon=True)
    traffic, limit = TrafficMonitor(), stall_timeout if seconds is None else seconds
    thread.start()
    if not wait_for_transfer(thread, limit, traffic):
        raise TransferStalled(f"no bytes have moved for {limit:g} s")
    if errors:
        raise errors[0]
    return outcome[0]
