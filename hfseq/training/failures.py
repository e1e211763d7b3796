"""An error of one process ends all of them, soon, and each with the text of the first.

jax by itself waits at its exit for processes that never come, and aborts with a stack trace what
has lost another (heartbeats); that remains for processes that die without a word.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator

from hfseq.errors import HfseqError, first_line
from hfseq.training import coordinator

FAILURE, LEAVING = "hfseq/failure", "hfseq/leaving"
INTERVAL = 1.0  # seconds between two looks for another process's error
# Together less than half of the shortest --heartbeat_timeout, after which jax aborts.
LEAVE_TIME = 3.0  # seconds that an ending coordinator gives the others to read why
LOST_TIME = 1.0  # seconds in which a process that ended will have said why


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Run the body; an exception in any process ends it in all of them.

    Raises:
        HfseqError: the connection to another process broke; with that process's error, if it had
            time to tell it.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(done,), daemon=True).start()
    try:
        yield
    except SystemExit:  # of all processes
        raise
    except BaseException as error:
        done.set()
        text, code = _reason(error)
        _tell(text, code)
        atexit.register(_leave, code)
        if _is_lost_connection(error):
            raise HfseqError(text) from error
        raise
    finally:
        done.set()


def _watch(done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        failure = coordinator.read(FAILURE)
        if failure and not done.is_set():
            _note_leaving()
            end_now(**json.loads(failure))


def _reason(error: BaseException) -> tuple[str, int]:
    """Return what the others are to read, and the exit code of all."""
    if _is_lost_connection(error):
        told = coordinator.poll(lambda: coordinator.read(FAILURE), LOST_TIME)
        if told:
            known = json.loads(told)
            return known["text"], known["code"]
        return (
            "the connection to another process was lost, which does not say why (killed? out of "
            f"memory?): see its log. jax: {first_line(error)}", 1,
        )  # fmt: skip
    who = f"process {coordinator.process_index()} on {socket.gethostname()}"
    return f"{who}: {first_line(error)}", getattr(error, "exit_code", 1)


def _tell(text: str, code: int) -> None:
    with contextlib.suppress(Exception):  # the first error counts, and the store may be gone
        coordinator.write(FAILURE, json.dumps({"text": text, "code": code}))
    _note_leaving()
    if coordinator.process_index() == 0:  # the store goes with this process
        everyone = coordinator.process_count()
        coordinator.poll(lambda: coordinator.count(LEAVING) >= everyone, LEAVE_TIME)


def _note_leaving() -> None:
    with contextlib.suppress(Exception):
        coordinator.write(f"{LEAVING}/{coordinator.process_index()}", "1", overwrite=True)


def _leave(code: int) -> None:
    """Leave at exit, but not by jax's way out, where this process would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_now(text: str, code: int) -> None:
    """End this process from a thread, whatever the main thread waits for."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    _leave(code)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, HfseqError) or not isinstance(error, RuntimeError | ValueError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "coordination", "closed by peer"))
