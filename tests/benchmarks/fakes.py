"""Contestants that need nothing, for the harness to run."""

from __future__ import annotations

import os
import time

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


def failing(after: int) -> harness.Running:
    """Fails at a step."""
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        if done > after:
            raise ValueError("out of luck")
        return {"loss": 1.0}

    return harness.Running(step, lambda: 1)


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
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        if done > after:
            time.sleep(3600)
        return {"loss": 1.0}

    return harness.Running(step, lambda: 1)
