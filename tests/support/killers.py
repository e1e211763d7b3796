"""A function that kills the worker process that runs it."""

from __future__ import annotations

import os
import signal
from typing import Any


def kill(work: Any) -> None:
    """Kills this process, like the operating system does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)
