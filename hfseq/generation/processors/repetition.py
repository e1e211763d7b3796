"""Processors against repetition: penalties and forbidden n-grams."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hfseq.generation.processors.base import (
    FlaxLogitsProcessor,
    positive_int,
    tokens_present,
)


def _check_penalty(penalty: Any) -> float:
    if not isinstance(penalty, float) or not penalty > 0:
        raise ValueError(f"`penalty` has to be a strictly positive float, but is {penalty!r}")
    return penalty


def _penalise(scores: jax.Array, present: jax.Array, penalty: float) -> jax.Array:
    return jnp.where(present, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


class FlaxRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens that are there already less probable (Keskar et al., 2019).

    Positive scores are divided and negative ones multiplied by ``penalty``. The first
    ``prompt_ignore_length`` tokens, a number or an array (rows,), do not count.
    """

    def __init__(self, penalty: float, prompt_ignore_length: Any = None):
        self.penalty, self.ignored = _check_penalty(penalty), prompt_ignore_length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Penalise every token of the row once."""
        places = jnp.arange(input_ids.shape[1])[None]
        start = 0 if self.ignored is None else jnp.reshape(jnp.asarray(self.ignored), (-1, 1))
        valid = jnp.broadcast_to((places >= start) & (places < cur_len), input_ids.shape)
        return _penalise(scores, tokens_present(input_ids, valid, scores.shape[-1]), self.penalty)


class FlaxEncoderRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens of the input more probable: a penalty on what is not there ("hallucination").

    ``encoder_input_ids`` is (batch, width), of which ``length`` columns count (all by default); a
    row of it serves several rows of scores where there are beams.
    """

    def __init__(self, penalty: float, encoder_input_ids: Any, length: Any = None):
        self.penalty = 1 / _check_penalty(penalty)
        self.ids, self.length = jnp.asarray(encoder_input_ids), length

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Raise the scores of the input's tokens."""
        valid = _columns(self.ids, self.length)
        present = tokens_present(self.ids, valid, scores.shape[-1])
        present = jnp.repeat(present, scores.shape[0] // present.shape[0], axis=0)
        return _penalise(scores, present, self.penalty)


def _columns(ids: jax.Array, length: Any) -> jax.Array:
    length = ids.shape[1] if length is None else length
    return jnp.broadcast_to(jnp.arange(ids.shape[1])[None] < length, ids.shape)


class FlaxNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids every n-gram of ``ngram_size`` tokens that the row already has."""

    def __init__(self, ngram_size: int):
        self.ngram_size = positive_int("ngram_size", ngram_size)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid what followed earlier occurrences of the last ``ngram_size - 1`` tokens."""
        return _forbid_ngrams(input_ids, cur_len, input_ids, cur_len, self.ngram_size, scores)


class FlaxEncoderNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids every n-gram of the input; ``length`` columns of ``encoder_input_ids`` count."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Any, length: Any = None):
        self.ngram_size = positive_int("encoder_ngram_size", encoder_ngram_size)
        ids = jnp.asarray(encoder_input_ids)
        self.ids = ids[None] if ids.ndim == 1 else ids
        self.length = self.ids.shape[1] if length is None else length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid what follows the last ``ngram_size - 1`` tokens in the input."""
        source = jnp.repeat(self.ids, scores.shape[0] // self.ids.shape[0], axis=0)
        return _forbid_ngrams(source, self.length, input_ids, cur_len, self.ngram_size, scores)


def _forbid_ngrams(
    source: jax.Array, length: Any, ids: jax.Array, cur_len: Any, size: int, scores: jax.Array
) -> jax.Array:
    """Forbid the last tokens of those n-grams of ``source`` that begin as ``ids`` ends."""
    windows = source.shape[1] - size + 1
    if windows < 1 or ids.shape[1] < size - 1:
        return scores
    matches = jnp.broadcast_to(jnp.arange(windows)[None] + size <= length, (len(ids), windows))
    if size > 1:
        end = jax.lax.dynamic_slice_in_dim(ids, cur_len - (size - 1), size - 1, axis=1)
        for place in range(size - 1):
            matches &= source[:, place : place + windows] == end[:, place, None]
        matches &= cur_len >= size - 1
    banned = tokens_present(source[:, size - 1 :], matches, scores.shape[-1])
    return jnp.where(banned, -jnp.inf, scores)
