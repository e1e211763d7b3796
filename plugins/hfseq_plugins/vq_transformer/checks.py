"""What calls are checked for before anything is computed: shapes alone, so also in ``jit``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hfseq.errors import UsageError


def check_call(config: Any, given: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
    """Raise one UsageError for inputs and a state that do not fit each other or the model."""
    problems = [*_wrong_pairs(given, state), *_wrong_shapes(given)]
    problems += [] if not state else _wrong_state(config, state)
    if problems:
        raise UsageError("; ".join(problems))


def _wrong_pairs(given: Mapping[str, Any], state: Mapping[str, Any] | None) -> Iterator[str]:
    if state and given["segment_ids"] is not None:
        yield (
            "past_key_values carry one document on, segment_ids cut rows into several: give one of "
            "them, or reset_rows for rows that begin a new document"
        )
    if given["reset_rows"] is not None and not state:
        yield "reset_rows needs past_key_values: without a state every row is fresh"


def _wrong_shapes(given: Mapping[str, Any]) -> Iterator[str]:
    ids = given["input_ids"]
    if isinstance(ids, (str, list, tuple)):
        return  # the base class has its own messages for these
    shape = np.shape(ids)
    for name, wanted in (
        ("attention_mask", shape), ("segment_ids", shape), ("code_mask", shape),
        ("reset_rows", shape[:1]),
    ):  # fmt: skip
        value = given[name]
        if value is not None and np.shape(value) != wanted:
            yield f"{name} is {np.shape(value)}, but input_ids are {shape}: it has to be {wanted}"


def _wrong_state(config: Any, state: Mapping[str, Any]) -> list[str]:
    """Compare the first attention's entries with the configuration."""
    while "position" not in state:
        state = next(part for part in state.values() if isinstance(part, Mapping))
    key, value = np.shape(state["window_key"]), np.shape(state["window_value"])
    sizes = {
        "window_size": (key[-2], config.window_size),
        "num_codes": (np.shape(state["cache_count"])[-1], config.num_codes),
        "key heads": (key[-3], config.key_heads),
        "head_dim": (key[-1], config.head_dim),
        "value_dim": (value[-1], config.value_width),
    }
    return [
        f"past_key_values was made for {name}={found}, the model has {name}={wanted}"
        for name, (found, wanted) in sizes.items()
        if found != wanted
    ]
