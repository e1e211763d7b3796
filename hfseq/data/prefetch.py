"""Make batches in a thread while the accelerator works on the ones before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(
    make_batch: Callable[[int], T], start: int, stop: int, depth: int = 2
) -> Iterator[tuple[int, T]]:
    """Yield ``(step, make_batch(step))`` for steps in [start, stop), made up to ``depth`` ahead.

    One thread makes them, in order. What it raises is raised here, with its traceback, once the
    batches before it are used up; closing the iterator ends the thread before ``close`` returns.
    """
    made: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def work() -> None:
        try:
            for step in range(start, stop):
                item = (step, make_batch(step), None)
                made.put(item)
                if stopped.is_set():
                    return
            made.put((stop, None, None))
        except BaseException as error:
            made.put((stop, None, error))

    thread = threading.Thread(target=work, name="hfseq-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            step, batch, error = made.get()
            if error is not None:
                raise error
            if step == stop:
                return
            yield step, batch
    finally:
        stopped.set()
        while thread.is_alive():  # it may wait for room in the queue
            try:
                made.get(timeout=0.01)
            except queue.Empty:
                pass
        thread.join()
