"""Processors that depend on how many tokens there are: minimal lengths and forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.generation.processors.base import (
    FlaxLogitsProcessor,
    is_one_of,
    positive_int,
    token_ids,
)


def _forbid(scores: jax.Array, tokens: Sequence[int], when: Any) -> jax.Array:
    return jnp.where(is_one_of(tokens, scores.shape[-1]) & when, -jnp.inf, scores)


def _force(scores: jax.Array, tokens: Sequence[int], when: Any) -> jax.Array:
    only = jnp.where(is_one_of(tokens, scores.shape[-1]), 0.0, -jnp.inf)
    return jnp.where(when, only, scores)


class FlaxMinLengthLogitsProcessor(FlaxLogitsProcessor):
    """Forbids the end token before ``min_length`` tokens, the prompt counted."""

    def __init__(self, min_length: int, eos_token_id: int | Sequence[int]):
        self.min_length = positive_int("min_length", min_length, 0)
        self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid the end while ``cur_len < min_length``."""
        return _forbid(scores, self.eos_token_id, cur_len < self.min_length)

    def touched(self) -> tuple[int, ...]:
        """Return the end tokens."""
        return self.eos_token_id


class FlaxMinNewTokensLengthLogitsProcessor(FlaxLogitsProcessor):
    """Forbids the end token before ``min_new_tokens`` tokens after the prompt."""

    def __init__(
        self, prompt_length_to_skip: int, min_new_tokens: int, eos_token_id: int | Sequence[int]
    ):
        self.prompt_length_to_skip = positive_int("prompt_length_to_skip", prompt_length_to_skip, 0)
        self.min_new_tokens = positive_int("min_new_tokens", min_new_tokens, 0)
        self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid the end while there are too few new tokens."""
        new = cur_len - self.prompt_length_to_skip
        return _forbid(scores, self.eos_token_id, new < self.min_new_tokens)

    def touched(self) -> tuple[int, ...]:
        """Return the end tokens."""
        return self.eos_token_id


class FlaxForcedBOSTokenLogitsProcessor(FlaxLogitsProcessor):
    """Makes ``bos_token_id`` the token after a prompt of one token (the decoder start)."""

    def __init__(self, bos_token_id: int):
        self.bos_token_id = bos_token_id

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Force it at ``cur_len == 1``."""
        return _force(scores, token_ids("bos_token_id", self.bos_token_id), cur_len == 1)

    def touched(self) -> tuple[int, ...]:
        """Return the forced token."""
        return token_ids("bos_token_id", self.bos_token_id)

    def forces(self, cur_len: Any) -> Any:
        """Tell whether this is its step."""
        return cur_len == 1


class FlaxForcedEOSTokenLogitsProcessor(FlaxLogitsProcessor):
    """Makes ``eos_token_id`` the last token when ``max_length`` is reached."""

    def __init__(self, max_length: int, eos_token_id: int | Sequence[int]):
        self.max_length = max_length
        self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Force it at ``cur_len == max_length - 1``."""
        return _force(scores, self.eos_token_id, cur_len == self.max_length - 1)

    def touched(self) -> tuple[int, ...]:
        """Return the end tokens."""
        return self.eos_token_id

    def forces(self, cur_len: Any) -> Any:
        """Tell whether this is its step."""
        return cur_len == self.max_length - 1


class FlaxForceTokensLogitsProcessor(FlaxLogitsProcessor):
    """Forces tokens at places: pairs (place, token); ``offset`` is added to the places."""

    def __init__(self, force_token_map: Any, offset: Any = 0):
        forced = {int(place): token for place, token in dict(force_token_map).items()}
        table = [-1] * (max(forced, default=-1) + 1)
        for place, token in forced.items():
            table[place] = -1 if token is None else int(token)
        self.force_token_array, self.offset = table, offset

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Force the token of the place ``cur_len``, if it has one."""
        token = self._token(cur_len)
        only = jnp.where(jnp.arange(scores.shape[-1]) == token, 0.0, -jnp.inf)
        return jnp.where(token >= 0, only, scores)

    def touched(self) -> list[int]:
        """Return all forced tokens."""
        return [token for token in self.force_token_array if token >= 0]

    def forces(self, cur_len: Any) -> Any:
        """Tell whether the place has a token."""
        return self._token(cur_len) >= 0

    def _token(self, cur_len: Any) -> jax.Array:
        """Return the token of the place, or -1."""
        place = cur_len - self.offset
        table = jnp.asarray(self.force_token_array, jnp.int32)
        inside = (place >= 0) & (place < len(table))
        return jnp.where(inside, table[jnp.clip(place, 0, len(table) - 1)], -1)


class FlaxExponentialDecayLengthPenalty(FlaxLogitsProcessor):
    """Raises the score of the end exponentially after ``start`` new tokens."""

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: int | Sequence[int],
        input_ids_seq_length: int,
    ):
        start, self.factor = exponential_decay_length_penalty
        self.start = start + input_ids_seq_length
        self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Add ``abs(score) * (factor ** steps - 1)`` to finite scores of the end."""
        steps = jnp.maximum(cur_len - self.start, 0)
        growth = jnp.power(jnp.float32(self.factor), steps) - 1
        raised = scores + jnp.where(jnp.isfinite(scores), jnp.abs(scores) * growth, 0.0)
        return jnp.where(is_one_of(self.eos_token_id, scores.shape[-1]), raised, scores)

    def touched(self) -> tuple[int, ...]:
        """Return the end tokens."""
        return self.eos_token_id
