"""The settings of the call of `trace.call` that a thread is executing."""

from __future__ import annotations

import dataclasses
import threading

import jax

from hfseq import nn


@dataclasses.dataclass(eq=False)
class TraceState:
    """The settings of a call of `trace.call` that operators and mask functions read.

    Attributes:
        keys: The keys of random operators. If it is `None`, random numbers must not be read.
        train: Whether the module is in training mode.
        segment_ids: Number of the packed document of each token, `(batch, length)`, or `None`.
    """

    keys: nn.Keys | None = None
    train: bool = False
    segment_ids: jax.Array | None = None


class _Calls(threading.local):
    def __init__(self) -> None:
        self.states: list[TraceState] = []


_calls = _Calls()


def enter(state: TraceState) -> None:
    """Makes `state` the current one of this thread. Calls may be nested."""
    _calls.states.append(state)


def leave() -> None:
    """Restores the state that was current before the last `enter`."""
    _calls.states.pop()


def current() -> TraceState:
    """Returns the settings of the innermost call in this thread."""
    return _calls.states[-1] if _calls.states else TraceState()


def is_tracing() -> bool:
    """Returns whether this thread traces a model."""
    return bool(_calls.states)
