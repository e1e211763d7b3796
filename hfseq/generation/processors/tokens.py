"""Processors that favour or forbid given tokens and sequences of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.generation.processors.base import FlaxLogitsProcessor, is_one_of, token_ids


class FlaxSuppressTokensLogitsProcessor(FlaxLogitsProcessor):
    """Forbids ``suppress_tokens`` everywhere."""

    def __init__(self, suppress_tokens: Sequence[int]):
        self.suppress_tokens = list(suppress_tokens)

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid them."""
        return jnp.where(is_one_of(self.suppress_tokens, scores.shape[-1]), -jnp.inf, scores)

    def touched(self) -> list[int]:
        """Return them."""
        return self.suppress_tokens


class FlaxSuppressTokensAtBeginLogitsProcessor(FlaxLogitsProcessor):
    """Forbids ``begin_suppress_tokens`` as the token at place ``begin_index``."""

    def __init__(self, begin_suppress_tokens: Sequence[int], begin_index: int):
        self.begin_suppress_tokens = list(begin_suppress_tokens)
        self.begin_index = begin_index

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid them at ``cur_len == begin_index``."""
        forbidden = is_one_of(self.begin_suppress_tokens, scores.shape[-1])
        return jnp.where(forbidden & (cur_len == self.begin_index), -jnp.inf, scores)

    def touched(self) -> list[int]:
        """Return them."""
        return self.begin_suppress_tokens


class FlaxSequenceBiasLogitsProcessor(FlaxLogitsProcessor):
    """Adds a bias to the last token of a sequence when the others have just been generated.

    ``sequence_bias`` maps tuples of tokens to floats, or is a list of ``[tokens, bias]``.
    """

    def __init__(self, sequence_bias: Any):
        self.sequence_bias = _checked(sequence_bias)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Add the biases of all sequences that the next token may complete."""
        size = scores.shape[-1]
        outside = [i for sequence in self.sequence_bias for i in sequence if i >= size]
        if outside:
            raise ValueError(
                f"the vocabulary has {size} tokens, but `sequence_bias` (or `bad_words_ids`) names "
                f"{outside}"
            )
        groups = _by_length(self.sequence_bias)
        always = np.zeros(size, np.float32)  # a constant: nothing of the scores' size is written
        for (token,), value in groups.pop(1, []):
            always[token] += value
        bias = jnp.asarray(always, scores.dtype)
        for length, group in groups.items():
            prefixes = jnp.asarray([sequence[:-1] for sequence, _ in group], jnp.int32)
            last = jnp.asarray([sequence[-1] for sequence, _ in group], jnp.int32)
            values = jnp.asarray([value for _, value in group], scores.dtype)
            matches = ends_with(input_ids, cur_len, prefixes.reshape(len(group), length - 1))
            bias = jnp.broadcast_to(bias, scores.shape)
            bias = bias.at[:, last].add(jnp.where(matches, values, 0.0))
        return scores + bias

    def touched(self) -> list[int]:
        """Return the last tokens of the sequences."""
        return sorted({sequence[-1] for sequence in self.sequence_bias})


def ends_with(input_ids: jax.Array, cur_len: Any, sequences: jax.Array) -> jax.Array:
    """Return (rows, sequences): whether the first ``cur_len`` tokens of a row end with a sequence.

    ``sequences`` is (sequences, length), all of one length.
    """
    length = sequences.shape[1]
    if length > input_ids.shape[1]:
        return jnp.zeros((input_ids.shape[0], sequences.shape[0]), bool)
    end = jax.lax.dynamic_slice_in_dim(input_ids, cur_len - length, length, axis=1)
    same = (end[:, None, :] == sequences[None]).all(-1)
    return same & (cur_len >= length)


def _by_length(biases: Mapping[tuple[int, ...], float]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for sequence, bias in biases.items():
        groups.setdefault(len(sequence), []).append((sequence, bias))
    return groups


def _checked(sequence_bias: Any) -> dict[tuple[int, ...], float]:
    if isinstance(sequence_bias, Mapping):
        pairs: list[Any] = list(sequence_bias.items())
    else:
        pairs = list(sequence_bias) if isinstance(sequence_bias, (list, tuple)) else []
    good = pairs and all(len(pair) == 2 and isinstance(pair[1], float) for pair in pairs)
    if not good or any(not isinstance(pair[0], (tuple, list)) or not pair[0] for pair in pairs):
        raise ValueError(
            "`sequence_bias` has to be a non-empty dict from tuples of tokens to floats, or a list "
            f"of [tokens, float], but is {sequence_bias!r}"
        )
    return {token_ids("sequence_bias", tuple(sequence)): bias for sequence, bias in pairs}


class FlaxNoBadWordsLogitsProcessor(FlaxSequenceBiasLogitsProcessor):
    """Forbids sequences of tokens: the last token of each after the others.

    A single end token is not forbidden: use ``min_new_tokens`` for that.
    """

    def __init__(
        self,
        bad_words_ids: Sequence[Sequence[int]],
        eos_token_id: int | Sequence[int] | None = None,
    ):
        words = list(bad_words_ids) if isinstance(bad_words_ids, (list, tuple)) else []
        if not words or any(not isinstance(word, (list, tuple)) or not word for word in words):
            raise ValueError(
                f"`bad_words_ids` has to be a non-empty list of non-empty lists of tokens, but is "
                f"{bad_words_ids!r}"
            )
        ends = () if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
        sequences = [token_ids("bad_words_ids", tuple(word)) for word in words]
        kept = [s for s in sequences if len(s) > 1 or s[0] not in ends]
        self.sequence_bias = {sequence: -float("inf") for sequence in kept}
