"""What a worker process can be given to do that ends it."""

from __future__ import annotations

import os
import signal
from typing import Any


def kill(work: Any) -> None:
    """End this process as the system does for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
