"""What every logits processor is: a pure function of the tokens so far and the next scores."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class FlaxLogitsProcessor(ABC):
    """Changes the scores of the next token.

    It is called with ``input_ids`` (rows, width), a buffer of which only the first ``cur_len``
    columns hold tokens; ``scores`` (rows, vocabulary) in float32, logits in sampling and greedy
    search and log-probabilities in beam search; and ``cur_len``, a number or, inside the compiled
    loop, a tracer. It returns new scores and must be traceable: ``jnp.where`` instead of ``if``.
    """

    @abstractmethod
    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Return the new scores."""

    def touched(self) -> Sequence[int] | None:
        """Return the tokens whose scores it may change, in any row; ``None`` if that is unknown.

        The search then looks at the others once, before all processors.
        """
        return None

    def forces(self, cur_len: Any) -> Any:
        """Tell whether all tokens but the touched ones become impossible at this step."""
        return False


class FlaxLogitsWarper(FlaxLogitsProcessor):
    """A processor that reshapes the distribution and so is only used when sampling."""


class FlaxLogitsProcessorList(list):
    """Processors that are applied one after the other."""

    def __call__(
        self, input_ids: jax.Array, scores: jax.Array, cur_len: Any, **kwargs: Any
    ) -> jax.Array:
        """Apply all; a processor with further parameters gets them from ``kwargs``."""
        for processor in self:
            extra = list(inspect.signature(processor).parameters)[3:]
            missing = [name for name in extra if name not in kwargs]
            if missing:
                raise ValueError(
                    f"Make sure that all the required parameters: {extra} for "
                    f"{type(processor).__name__} are passed to the logits processor: "
                    f"{', '.join(missing)} missing"
                )
            scores = processor(input_ids, scores, cur_len, **{name: kwargs[name] for name in extra})
        return scores


def traced(value: Any) -> bool:
    """Tell whether a number is an array (perhaps a tracer), whose value cannot be checked here."""
    return isinstance(value, jax.Array)


def positive_int(name: str, value: Any, lowest: int = 1) -> Any:
    """Return ``value`` if it is an integer of at least ``lowest`` (or traced); else ValueError."""
    if traced(value):
        return value
    kind = "strictly positive" if lowest else "non-negative"
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"`{name}` has to be a {kind} integer, but is {value!r}")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return one or several token ids as a tuple; ValueError if they are not natural numbers."""
    ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not all(hasattr(i, "__index__") and not isinstance(i, bool) and int(i) >= 0 for i in ids):
        raise ValueError(f"`{name}` has to be a (list of) non-negative integers, but is {value!r}")
    return tuple(map(int, ids))


def is_one_of(ids: Sequence[int], size: int) -> jax.Array:
    """Return a boolean vector of ``size`` with True at ``ids``; ids outside are ignored."""
    mask = np.zeros(size, bool)  # NumPy: a constant of the compiled program
    mask[[i for i in ids if i < size]] = True
    return jnp.asarray(mask)


def tokens_present(ids: jax.Array, valid: jax.Array, vocab_size: int) -> jax.Array:
    """Return (rows, vocabulary): which tokens ``ids`` (rows, width) holds where ``valid``."""
    places = jnp.where(valid, ids, vocab_size)
    rows = jnp.arange(ids.shape[0])[:, None]
    present = jnp.zeros((ids.shape[0], vocab_size), bool)
    return present.at[rows, places].set(True, mode="drop")
