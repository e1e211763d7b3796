"""Contestants that need nothing, for the harness to run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import harness


def steady(loss: float = 1.0) -> harness.Running:
    """Counts its steps, and says which process it is."""
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        print("libraries print to standard output")
        return {"loss": loss / done, "process": os.getpid()}

    mark = {"mark": os.environ["MARK"]} if "MARK" in os.environ else {}
    return harness.Running(step, lambda: 3_000_000, {"device": "fake", **mark})


def _after(steps: int, end: Callable[[], None]) -> harness.Running:
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        if done > steps:
            end()
        return {"loss": 1.0}

    return harness.Running(step, lambda: 1)


def failing(after: int) -> harness.Running:
    """Fails at a step."""

    def fail() -> None:
        raise ValueError("out of luck")

    return _after(after, fail)


def broken() -> harness.Running:
    """Fails while it is built."""
    raise OSError("no such weights")


def gone() -> harness.Running:
    """Ends without a word, as a process that ran out of memory does."""
    os._exit(9)


def silent() -> harness.Running:
    """Never gets ready."""
    time.sleep(3600)
    raise AssertionError


def timed() -> harness.Running:
    """Says itself how long its step took."""
    return harness.Running(lambda: {"seconds": 2.5, "loss": 1.0}, lambda: 1)


def stuck(after: int) -> harness.Running:
    """Takes so many steps, and then one that does not end."""
    return _after(after, lambda: time.sleep(3600))
