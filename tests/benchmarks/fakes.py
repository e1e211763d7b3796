"""Workloads without dependencies, for the tests of the benchmark harness."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import harness


def steady(loss: float = 1.0) -> harness.Workload:
    """Returns a decreasing loss and the process ID."""
    count = 0

    def step() -> dict[str, float]:
        nonlocal count
        count += 1
        print("libraries print to standard output")
        return {"loss": loss / count, "process": os.getpid()}

    mark = {"mark": os.environ["MARK"]} if "MARK" in os.environ else {}
    return harness.Workload(step, lambda: 3_000_000, {"device": "fake", **mark})


def _after(steps: int, action: Callable[[], None]) -> harness.Workload:
    count = 0

    def step() -> dict[str, float]:
        nonlocal count
        count += 1
        if count > steps:
            action()
        return {"loss": 1.0}

    return harness.Workload(step, lambda: 1)


def failing(steps: int) -> harness.Workload:
    """Raises an exception after ``steps`` steps."""

    def fail() -> None:
        raise ValueError("out of luck")

    return _after(steps, fail)


def broken() -> harness.Workload:
    """Raises an exception while it is built."""
    raise OSError("no such weights")


def exiting() -> harness.Workload:
    """Exits without a message, like a process that ran out of memory."""
    os._exit(9)


def silent() -> harness.Workload:
    """Blocks while it is built."""
    time.sleep(3600)
    raise AssertionError


def timed() -> harness.Workload:
    """Reports the time of its steps itself."""
    return harness.Workload(lambda: {"seconds": 2.5, "loss": 1.0}, lambda: 1)


def stuck(steps: int) -> harness.Workload:
    """Blocks after ``steps`` steps."""
    return _after(steps, lambda: time.sleep(3600))
