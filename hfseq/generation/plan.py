"""What a run of generation consists of: static decisions, operands, and the state of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hfseq.generation.options import Options
from hfseq.generation.processors import FlaxLogitsProcessor

Criterion = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part: a program is compiled for each plan (and for the shapes of operands).

    ``buffer`` is the width of the token buffer and of the cache; ``steps`` the number of steps
    whose scores are recorded (0: none).
    """

    options: Options
    buffer: int
    steps: int = 0
    encoder_decoder: bool = False
    processors: tuple[Any, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    @property
    def pad(self) -> int:
        """What fills rows after their end; never seen where nothing ends a row early."""
        return 0 if self.options.pad_token_id is None else self.options.pad_token_id

    def key(self) -> Any:
        """Return what tells plans apart: processors of equal type and settings are equal."""
        parts = tuple(_freeze(part) for part in (*self.processors, *self.criteria))
        count = len(self.processors)
        return self.options, self.buffer, self.steps, self.encoder_decoder, count, parts


class Operands(NamedTuple):
    """The arrays that a program is called with.

    ``prompt`` and ``mask`` are (batch, prefill width), of which ``prompt_length`` columns are real;
    ``encoder`` holds the arguments of ``encode``, or ``encoder_outputs`` made by the caller;
    ``extra`` the model's collections.
    """

    params: Any
    prompt: Any
    mask: Any
    key: Any
    prompt_length: Any
    stop_length: Any
    min_length: Any
    encoder: dict[str, Any]
    encoder_outputs: Any
    encoder_length: Any
    model_kwargs: dict[str, Any]
    extra: dict[str, Any]

    def source(self) -> tuple[Any, Any]:
        """Return the tokens that were put in and how many columns of them are real."""
        if "input_ids" in self.encoder:
            return self.encoder["input_ids"], self.encoder_length
        return self.prompt, self.prompt_length


def _freeze(part: Any) -> Any:
    """Return a hashable stand-in for a processor or criterion; functions stand for themselves."""
    if not isinstance(part, FlaxLogitsProcessor):
        return part
    try:
        key = type(part), tuple((name, _frozen(value)) for name, value in vars(part).items())
        hash(key)
    except TypeError:  # an attribute that is not a plain value, or a tracer
        return part
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.shape, np.asarray(value).tobytes()
    return value
