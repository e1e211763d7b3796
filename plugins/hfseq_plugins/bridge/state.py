"""The call of `trace.call` that a thread is executing."""

from __future__ import annotations

import dataclasses
import threading

import jax

from hfseq import nn


@dataclasses.dataclass(eq=False)
class TraceState:
    """The settings of a call that operators and registered functions need.

    Attributes:
        keys: The keys of random operators, or `None` if nothing may be random.
        train: Whether the module is in training mode.
        segment_ids: Numbers of the packed documents, `(batch, length)`, or `None`.
    """

    keys: nn.Keys | None = None
    train: bool = False
    segment_ids: jax.Array | None = None


class _Calls(threading.local):
    def __init__(self) -> None:
        self.states: list[TraceState] = []


_calls = _Calls()


def enter(state: TraceState) -> None:
    """Begins a call. Calls may be nested."""
    _calls.states.append(state)


def leave() -> None:
    """Ends the innermost call."""
    _calls.states.pop()


def current() -> TraceState:
    """Returns the innermost call of this thread."""
    return _calls.states[-1] if _calls.states else TraceState()
