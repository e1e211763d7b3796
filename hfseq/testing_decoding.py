"""The check of :func:`hfseq.testing.check_architecture` that decoding with a cache is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.testing import LENGTH, ROWS, Case, Skipped, arrays, assert_close, compiled, host, jit

PROMPT = 5


def cached_decoding(case: Case) -> None:
    """Feeding a prompt and then token by token through the cache gives the full forward pass."""
    full, parts = (_source_and_target if len(case.sides) == 2 else _one_sequence)(case)
    names = [name for name in full if case.per_token(name) and name in parts[0]]
    if not names:
        raise Skipped("decode() has no head to compare")
    ours = {
        name: case.only_real(name, np.concatenate([p[name] for p in parts], 1)) for name in names
    }
    theirs = {name: case.only_real(name, full[name]) for name in names}
    assert_close(ours, theirs, 1e-5, "decoding with a cache against the full forward pass")


def _one_sequence(case: Case) -> tuple[dict, list[dict]]:
    """Run a decoder without an encoder, whole and in chunks."""
    model, ids = case.model, case.inputs["input_ids"]
    try:
        cache = model.init_cache(ROWS, LENGTH)
    except UsageError as reason:
        raise Skipped(str(reason)) from None
    others = {n: v for n, v in case.inputs.items() if n.startswith("encoder_")}
    mask = case.inputs["attention_mask"]

    def place(positions: Any) -> dict[str, Any]:
        if model.fixed_state:  # it knows where it stands, and is told about the new tokens only
            return {"attention_mask": jnp.take_along_axis(mask, positions, axis=1)}
        return {"attention_mask": mask, "position_ids": positions}

    whole = {**others, "input_ids": ids, **place(_positions(ids))}
    full = host(compiled(model)(model.params, whole))

    def step(params: Any, cache: Any, ids: Any, positions: Any) -> Any:
        return model(ids, past_key_values=cache, params=params, **others, **place(positions))

    return full, _in_chunks(step, model.params, cache, ids)


def _source_and_target(case: Case) -> tuple[dict, list[dict]]:
    """Encode once, keep the encoder's keys and values in the cache, decode in chunks."""
    model, ids = case.model, case.inputs["decoder_input_ids"]
    mask = case.inputs["attention_mask"]

    @jit
    def begin(params: Any) -> Any:
        encoded = model.encode(case.inputs["input_ids"], attention_mask=mask, params=params)
        return encoded, model.init_cache(ROWS, ids.shape[1], encoded, params=params)

    encoded, cache = begin(model.params)
    positioned = model.takes("decoder_position_ids", "decode")

    def step(params: Any, cache: Any, ids: Any, positions: Any) -> Any:
        placed = {"decoder_position_ids": positions} if positioned else {}
        return model.decode(
            ids, encoded, encoder_attention_mask=mask,
            decoder_attention_mask=case.inputs["decoder_attention_mask"], past_key_values=cache,
            params=params, **placed,
        )  # fmt: skip

    return case.outputs, _in_chunks(step, model.params, cache, ids)


def _positions(ids: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)


def _in_chunks(step: Callable[..., Any], params: Any, cache: Any, ids: np.ndarray) -> list[dict]:
    """Feed the prompt, then each token alone; return the outputs of every call."""

    @jit
    def run(params: Any, cache: Any, ids: Any, positions: Any) -> Any:
        output = step(params, cache, ids, positions)
        return arrays(output), output.past_key_values

    parts, start, positions = [], 0, _positions(ids)
    for size in (PROMPT, *[1] * (ids.shape[1] - PROMPT)):
        chosen = slice(start, start + size)
        outputs, cache = run(params, cache, ids[:, chosen], positions[:, chosen])
        parts.append(host(outputs))
        start += size
    return parts


CHECKS = (cached_decoding,)
