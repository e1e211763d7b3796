"""What models check about their inputs before anything is computed."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError

#: The entries of a module that the facade calls.
METHODS = ("__call__", "encode", "decode")


def accepted_inputs(module_class: Any) -> dict[str, set[str] | None]:
    """Return the argument names of each entry of a module; ``None`` where it takes any name."""
    return {
        method: _names(getattr(module_class, method))
        for method in METHODS
        if hasattr(module_class, method)
    }


def _names(function: Any) -> set[str] | None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def as_array(name: str, value: Any) -> Any:
    """Cast integer inputs to int32, as v4 did; leave tracers' and floats' types alone."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be an array of numbers, not text: call the tokenizer first")
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], jax.Array):
        value = _rectangular(name, value)
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.asarray(value, jnp.int32)
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def _rectangular(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:
        raise UsageError(
            f"{name} has rows of different lengths: pad them (tokenizer(texts, padding=True, "
            'return_tensors="np")) and pass the attention_mask too'
        ) from None


def check_ids(name: str, ids: Any, vocab_size: int | None) -> None:
    """Refuse what would read outside of a table: silent NaN in Flax (spec: v4 defect D13)."""
    if isinstance(ids, (list, tuple)) and ids and not isinstance(ids[0], (jax.Array, str)):
        ids = _rectangular(name, ids)
    if not isinstance(ids, np.ndarray) or not vocab_size or not ids.size:
        return
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UsageError(
            f"{name} hold {ids.max() if ids.max() >= vocab_size else ids.min()}, outside of the "
            f"model's vocabulary of {vocab_size}: use the tokenizer that was trained with this "
            "model"
        )


def check_length(name: str, ids: Any, limit: int | None, owner: str, table: str) -> None:
    """Refuse sequences longer than a table of positions, which JAX would answer with NaN."""
    length = (0, *np.shape(ids))[-1]
    if limit is not None and length > limit:
        raise UsageError(
            f"{name} have {length} tokens a row, {owner} allows {limit} ({table}): truncate the "
            "input or use a model with a longer table of positions"
        )


__all__ = ["METHODS", "accepted_inputs", "as_array", "check_ids", "check_length"]
