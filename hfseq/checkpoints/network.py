"""Abandons network transfers that stall.

``huggingface_hub`` and the file systems of ``fsspec`` may wait forever, or retry for a very long
time. hfseq therefore calls them in a separate thread. If no bytes have been transferred for
`stall_timeout` seconds, hfseq stops waiting for this thread. A slow transfer is never interrupted.
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

#: Seconds without network traffic after which a transfer is abandoned. The flag ``--hub_timeout``
#: sets this value.
stall_timeout = DEFAULT_STALL_TIMEOUT = 600.0

#: Minimum number of transferred bytes that count as progress. Fewer bytes may be a repeated request
#: or a response that arrives extremely slowly.
MIN_PROGRESS_BYTES = 1 << 14


class TransferStalled(CheckpointError):
    """A transfer was abandoned because no network traffic was observed."""


_ignored: frozenset[str] = frozenset()


def ignore_open_connections() -> None:
    """Excludes the currently open connections from the measurement of traffic.

    Call this after the processes of a run have connected, so that their communication does not
    count as progress of a transfer.
    """
    global _ignored
    _ignored = frozenset(_connections())


class TrafficMonitor:
    """Measures the traffic of this process's TCP connections.

    Only Linux reports the traffic. On other operating systems, connections always seem idle.
    """

    def __init__(self) -> None:
        self._known = _connections()
        self._since, self._moved = time.monotonic(), 0

    def idle_seconds(self) -> float:
        """Returns the seconds since the last progress, or since this object was created.

        Call this method frequently, because it only notices progress when it is called.
        """
        connections = _connections()
        for name in connections.keys() - _ignored:
            self._moved += max(0, connections[name] - self._known.get(name, 0))
        self._known = connections
        if self._moved >= MIN_PROGRESS_BYTES:
            self._since, self._moved = time.monotonic(), 0
        return time.monotonic() - self._since


def _connections() -> dict[str, int]:
    """Returns the sum of acknowledged and received bytes of each connection.

    Linux provides both numbers with the socket option ``TCP_INFO`` (see the manual page tcp(7)).
    """
    moved = {}
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            link = os.readlink(f"{folder}/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                moved[link] = sum(struct.unpack_from("=QQ", info, 120))
        except (OSError, struct.error):  # it was closed, or is not a TCP socket
            continue
    return moved


def wait_for_transfer(thread: threading.Thread, seconds: float, traffic: TrafficMonitor) -> bool:
    """Waits for a daemon thread that transfers files, and abandons it if the network is idle.

    Args:
        thread: The thread.
        seconds: Maximum time without network traffic.
        traffic: The monitor that measures the traffic.

    Returns:
        Whether the thread has ended. `False` means that it was abandoned.
    """
    try:
        while thread.is_alive():
            thread.join(min(1.0, seconds / 10))
            if thread.is_alive() and traffic.idle_seconds() > seconds:
                _leave(thread)
                return False
    except BaseException:  # raised by a signal handler, for example KeyboardInterrupt
        _leave(thread)
        raise
    return True


def is_abandoned() -> bool:
    """Returns whether the current thread has been abandoned."""
    return threading.current_thread() in _LEFT


_LEFT: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _leave(thread: threading.Thread) -> None:
    """Abandons a daemon thread, and lets the process exit while the thread is still running.

    Uploads of several files use a thread pool. At exit, Python waits for the threads of a pool even
    if they are daemon threads. This function removes them from the list of threads to wait for.
    """
    from concurrent.futures import thread as pools

    _LEFT.add(thread)
    queues = getattr(pools, "_threads_queues", {})
    for worker in list(queues):
        if worker.daemon:
            queues.pop(worker, None)


def run_with_stall_timeout(call: Callable[[], T], seconds: float | None = None) -> T:
    """Calls ``call()`` in a separate thread and returns its result.

    Args:
        call: The function to call.
        seconds: Maximum time without network traffic. Default: `stall_timeout`.

    Raises:
        TransferStalled: No network traffic was observed for ``seconds``.
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
        raise TransferStalled(f"no network traffic for {limit:g} s")
    if errors:
        raise errors[0]
    return outcome[0]
