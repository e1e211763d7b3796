"""Signals: finish the step, save, leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from hfseq.training import coordinator, distributed

logger = logging.getLogger(__name__)


class StopSignal:
    """Catches SIGTERM and SIGINT while in force; ``received`` is the signal's number, or 0.

    Of several processes one signal stops all, after the same step: jax's preemption service, which
    then has SIGTERM to itself, agrees on it, and ``received`` is set when that step is done.
    """

    def __init__(self) -> None:
        self.received = 0
        self._together = coordinator.process_count() > 1
        self._interrupted = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            try:
                self._old[number] = signal.signal(number, self._catch)
            except ValueError:  # not in the main thread: the caller has the signals
                break
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def after(self, step: int) -> bool:
        """Return whether to stop now that ``step`` is done; call it after every step."""
        if self._together and not self.received and distributed.agreed_to_stop(step):
            self.received = signal.SIGINT if self._interrupted else signal.SIGTERM
            logger.warning("a signal was received: all processes save and stop at step %d", step)
        return bool(self.received)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if (self.received or self._interrupted) and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        logger.warning("%s received: saving after this step (Ctrl-C again leaves at once)", name)
        if self._together:
            self._interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)  # to jax, which tells the others
        else:
            self.received = number
