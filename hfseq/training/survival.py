"""Signals: finish the step, save, leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class StopSignal:
    """Catches SIGTERM and SIGINT while in force; ``received`` is the signal's number, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._old[number] = signal.signal(number, self._catch)
            except ValueError:  # not in the main thread: the caller has the signals
                break
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        logger.warning("%s received: saving after this step (Ctrl-C again leaves at once)", name)
