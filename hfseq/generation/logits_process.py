"""Logits processors and warpers: functions that change the scores of the next token.

Warpers are processors that are used only in sampling. They neither sort the scores of the
vocabulary nor scatter into them, because both are slow. Instead, they search for a threshold. The
scores may belong to any set of candidates. After top-k, the other warpers therefore process only k
scores.

A row is one decoded sequence of the batch. `cur_len` is the number of tokens in each row.
"""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

#: A number of tokens: an integer, or an array, which is a tracer inside of the compiled loop.
Length = int | jax.Array
TokenIds = int | Sequence[int]
Biases = Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]]


class FlaxLogitsProcessor(ABC):
    """Base class of functions that change the scores of the next token.

    A processor must be traceable. For example, it uses ``jnp.where`` instead of ``if``.
    """

    #: The tokens whose scores the processor can change in any row, or `None` if unknown.
    tokens: Sequence[int] | None = None

    @abstractmethod
    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Returns the new scores.

        Args:
            input_ids: Token buffer, `(rows, width)`. Only the first ``cur_len`` columns contain
                tokens.
            scores: Scores, float32 `(rows, vocab_size)`: logits in greedy search and sampling,
                log-probabilities in beam search.
            cur_len: Number of tokens. A tracer inside of the compiled loop.
        """

    def affected_tokens(self) -> Sequence[int] | None:
        """Returns :attr:`tokens`.

        The search computes the maxima of blocks of scores before the processors run. Afterwards it
        only updates the maxima of blocks with affected tokens (:mod:`hfseq.nn.cpu`).
        """
        return self.tokens

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Returns whether the processor forbids all tokens except the affected ones at this step.

        Args:
            cur_len: Number of tokens. A tracer inside of the compiled loop.
        """
        return False


class FlaxLogitsWarper(FlaxLogitsProcessor):
    """A processor that reshapes the distribution and is used only for sampling."""


class FlaxLogitsProcessorList(list):
    """A list of processors that are applied in order."""

    def __call__(
        self, input_ids: jax.Array, scores: jax.Array, cur_len: Length, **kwargs: Any
    ) -> jax.Array:
        """Applies all processors.

        Args:
            input_ids: See :class:`FlaxLogitsProcessor`.
            scores: See :class:`FlaxLogitsProcessor`.
            cur_len: See :class:`FlaxLogitsProcessor`.
            **kwargs: Values of further parameters that processors have, by name.

        Raises:
            ValueError: A parameter of a processor is missing in ``kwargs``.
        """
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


# -- warpers


class FlaxTemperatureLogitsWarper(FlaxLogitsWarper):
    """Divides the scores by ``temperature``.

    The distribution is sharper below 1 and flatter above 1.
    """

    def __init__(self, temperature: float):
        hint = "; for greedy search set do_sample=False" if temperature == 0 else ""
        valid = isinstance(temperature, float) and temperature > 0
        _check(valid, "temperature", "a strictly positive float", temperature, hint)
        self.temperature = temperature

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return scores / self.temperature


class _Filter(FlaxLogitsWarper):
    """A warper that sets the scores of improbable tokens to ``filter_value``."""

    def __init__(self, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1):
        self.filter_value = filter_value
        self.min_tokens_to_keep = _integer("min_tokens_to_keep", min_tokens_to_keep)

    def _keep(self, scores: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return jnp.where(self._keep(scores), scores, self.filter_value)

    def _best(self, scores: jax.Array) -> jax.Array:
        """Returns a mask of the ``min_tokens_to_keep`` highest scores."""
        return scores >= kth_largest(scores, self.min_tokens_to_keep)


def kth_largest(scores: jax.Array, k: int) -> jax.Array:
    """Returns the ``k``-th largest score of each row, `(rows, 1)`.

    If there are fewer than ``k`` scores, it is the smallest one.
    """
    if k == 1:
        return scores.max(-1, keepdims=True)
    return lax.top_k(scores, min(k, scores.shape[-1]))[0][:, -1:]


def smallest_reaching(
    values: jax.Array, weights: jax.Array, reached: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Finds the smallest threshold in each row that reaches a sufficient sum of weights.

    The sum includes the weights of all elements whose values do not exceed the threshold. The bits
    of non-negative floats, read as integers, have the same order as the floats. A bisection over
    integers therefore finds the threshold. On a CPU, sorting a vocabulary takes 20 times as long.

    Args:
        values: Non-negative values, `(rows, n)`.
        weights: Non-negative weights, same shape.
        reached: A function that returns whether a sum of weights is sufficient.

    Returns:
        The thresholds, `(rows, 1)`. In a row whose total weight is not sufficient, it is the
        largest value.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    high = bits.max(-1, keepdims=True)
    low = jnp.full_like(high, -1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = reached(jnp.where(bits <= middle, weights, 0.0).sum(-1, keepdims=True))
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.fori_loop(0, 32, halve, (low, high))
    return lax.bitcast_convert_type(high, jnp.float32)


def _entropy_terms(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities and probabilities of all tokens, and their entropy terms.

    The entropy term of a token with the probability p is ``-p * log(p)``.
    """
    log_probabilities = jax.nn.log_softmax(scores, axis=-1)
    probabilities = jnp.exp(log_probabilities)
    terms = jnp.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
    return log_probabilities, probabilities, terms


class FlaxTopKLogitsWarper(_Filter):
    """Keeps the ``top_k`` highest scores, and all scores equal to the lowest of them."""

    def __init__(
        self, top_k: int, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        self.top_k = max(_integer("top_k", top_k), min_tokens_to_keep)

    def _keep(self, scores: jax.Array) -> jax.Array:
        return scores >= kth_largest(scores, self.top_k)


class FlaxTopPLogitsWarper(_Filter):
    """Keeps the smallest set of tokens whose probabilities add up to at least ``top_p``.

    See Holtzman et al., 2019.
    """

    def __init__(
        self, top_p: float, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        valid = isinstance(top_p, float) and 0 <= top_p <= 1
        _check(valid, "top_p", "a float > 0 and < 1", top_p)
        self.top_p = top_p

    def _keep(self, scores: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(scores, axis=-1)
        dropped = jnp.float32(1 - self.top_p)
        least = smallest_reaching(probabilities, probabilities, lambda mass: mass > dropped)
        tied = probabilities == least

        def last_of(probabilities: jax.Array, least: jax.Array, dropped: jax.Array) -> jax.Array:
            """Keeps as many of the equal probabilities as needed, beginning with the last one.

            A stable sort would select the same tokens.
            """
            tied = probabilities == least
            mass = jnp.where(probabilities <= least, probabilities, 0.0).sum(-1, keepdims=True)
            num_later_ties = tied.sum(-1, keepdims=True) - jnp.cumsum(tied, axis=-1)
            return tied & ((num_later_ties == 0) | (mass - num_later_ties * least > dropped))

        # Equal probabilities are rare, and counting them is slow.
        tied = lax.cond(
            (tied.sum(-1) > 1).any(), last_of, lambda *_: tied, probabilities, least, dropped
        )
        is_kept = (probabilities > least) | tied
        return is_kept if self.min_tokens_to_keep == 1 else is_kept | self._best(scores)


class FlaxTopHLogitsWarper(FlaxLogitsWarper):
    """Keeps the most probable tokens while the sum of their entropy terms is small enough.

    The sum must not exceed the fraction ``top_h`` of the entropy. As in PyTorch, only the 100 most
    probable tokens are considered.
    """

    candidates = 100

    def __init__(self, top_h: float, filter_value: float = -float("inf")):
        _check(0 < top_h <= 1, "top_h", "a float > 0 and <= 1", top_h)
        self.top_h, self.filter_value = top_h, filter_value

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        best = lax.top_k(scores, min(self.candidates, scores.shape[-1]))[0]
        _, _, terms = _entropy_terms(best)
        is_kept = jnp.cumsum(terms, -1) <= terms.sum(-1, keepdims=True) * self.top_h
        last = jnp.maximum(is_kept.sum(-1, keepdims=True) - 1, 0)
        threshold = jnp.take_along_axis(best, last, axis=-1)
        return jnp.where(scores >= threshold, scores, self.filter_value)


class FlaxMinPLogitsWarper(_Filter):
    """Keeps tokens with at least ``min_p`` times the highest probability."""

    def __init__(
        self, min_p: float, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        _check(0 <= min_p <= 1, "min_p", "a float in the [0, 1] interval", min_p)
        self.min_p = min_p

    def _keep(self, scores: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(scores, axis=-1)
        enough = probabilities >= self.min_p * probabilities.max(-1, keepdims=True)
        return enough | self._best(scores)


class FlaxTypicalLogitsWarper(_Filter):
    """Keeps the tokens whose information content is nearest to the entropy.

    It keeps as many of them as needed for a total probability of ``mass`` (Meister et al., 2022).
    """

    def __init__(
        self, mass: float = 0.9, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        _check(0 < mass < 1, "typical_p", "a float > 0 and < 1", mass)
        self.mass = mass

    def _keep(self, scores: jax.Array) -> jax.Array:
        log_probabilities, probabilities, terms = _entropy_terms(scores)
        distance = jnp.abs(-log_probabilities - terms.sum(-1, keepdims=True))
        target_mass = jnp.float32(self.mass)
        furthest = smallest_reaching(distance, probabilities, lambda mass: mass >= target_mass)
        nearest = -kth_largest(-distance, self.min_tokens_to_keep)
        return distance <= jnp.maximum(furthest, nearest)


class FlaxEpsilonLogitsWarper(_Filter):
    """Removes tokens with a probability below ``epsilon`` (Hewitt et al., 2022)."""

    option = "epsilon_cutoff"

    def __init__(
        self, epsilon: float, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        _check(0 < epsilon < 1, self.option, "a float > 0 and < 1", epsilon)
        self.epsilon = epsilon

    def _keep(self, scores: jax.Array) -> jax.Array:
        return (jax.nn.softmax(scores, axis=-1) >= self.epsilon) | self._best(scores)


class FlaxEtaLogitsWarper(FlaxEpsilonLogitsWarper):
    """Removes tokens whose probability is below a threshold (Hewitt et al., 2022).

    The threshold is lower if the entropy is higher.
    """

    option = "eta_cutoff"

    def _keep(self, scores: jax.Array) -> jax.Array:
        _, probabilities, terms = _entropy_terms(scores)
        entropy = terms.sum(-1, keepdims=True)
        eta = jnp.minimum(self.epsilon, self.epsilon**0.5 * jnp.exp(-entropy))
        return (probabilities >= eta) | self._best(scores)


# -- processors of lengths and of single tokens


class FlaxInfNanRemoveLogitsProcessor(FlaxLogitsProcessor):
    """Replaces NaN by 0 and infinities by the largest finite numbers."""

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return jnp.nan_to_num(scores)


class FlaxLogitNormalization(FlaxLogitsProcessor):
    """Normalizes scores to log-probabilities."""

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return jax.nn.log_softmax(scores, axis=-1)


def _forbid(scores: jax.Array, tokens: Sequence[int], when: bool | jax.Array) -> jax.Array:
    return jnp.where(is_one_of(tokens, scores.shape[-1]) & when, -jnp.inf, scores)


class FlaxMinLengthLogitsProcessor(FlaxLogitsProcessor):
    """Forbids end tokens until there are ``min_length`` tokens, including the prompt."""

    def __init__(self, min_length: Length, eos_token_id: TokenIds):
        self.min_length = _integer("min_length", min_length, 0)
        self.tokens = self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.eos_token_id, cur_len < self.min_length)


class FlaxMinNewTokensLengthLogitsProcessor(FlaxMinLengthLogitsProcessor):
    """Forbids end tokens until there are ``min_new_tokens`` tokens after the prompt."""

    def __init__(self, prompt_length_to_skip: Length, min_new_tokens: int, eos_token_id: TokenIds):
        self.prompt_length_to_skip = _integer("prompt_length_to_skip", prompt_length_to_skip, 0)
        self.min_new_tokens = _integer("min_new_tokens", min_new_tokens, 0)
        super().__init__(prompt_length_to_skip + min_new_tokens, eos_token_id)


class _Forced(FlaxLogitsProcessor):
    """Makes ``tokens`` the only possible tokens at the steps for which :meth:`forces` is true."""

    tokens: tuple[int, ...]

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        only = jnp.where(is_one_of(self.tokens, scores.shape[-1]), 0.0, -jnp.inf)
        return jnp.where(self.forces(cur_len), only, scores)


class FlaxForcedBOSTokenLogitsProcessor(_Forced):
    """Forces ``bos_token_id`` after the first token, which is the decoder start token."""

    def __init__(self, bos_token_id: int):
        self.bos_token_id, self.tokens = bos_token_id, token_ids("bos_token_id", bos_token_id)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Returns ``cur_len == 1``."""
        return cur_len == 1


class FlaxForcedEOSTokenLogitsProcessor(_Forced):
    """Forces ``eos_token_id`` as the last token of outputs that reach ``max_length``."""

    def __init__(self, max_length: Length, eos_token_id: TokenIds):
        self.max_length = max_length
        self.tokens = self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Returns ``cur_len == max_length - 1``."""
        return cur_len == self.max_length - 1


class FlaxForceTokensLogitsProcessor(FlaxLogitsProcessor):
    """Forces a specific token at each of several positions.

    Args:
        force_token_map: Pairs of position and token. If the token is `None`, no token is forced.
        offset: Number that is added to the positions.
    """

    def __init__(
        self,
        force_token_map: Mapping[int, int | None] | Sequence[Sequence[int | None]],
        offset: Length = 0,
    ):
        pairs: dict[Any, int | None] = dict(force_token_map)  # type: ignore[arg-type]
        forced = {
            int(position): -1 if token is None else int(token) for position, token in pairs.items()
        }
        self.force_token_array = [forced.get(n, -1) for n in range(max(forced, default=-1) + 1)]
        self.tokens, self.offset = [n for n in self.force_token_array if n >= 0], offset

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        token = self._token(cur_len)
        only = jnp.where(jnp.arange(scores.shape[-1]) == token, 0.0, -jnp.inf)
        return jnp.where(token >= 0, only, scores)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Returns whether a token is forced at this position."""
        return self._token(cur_len) >= 0

    def _token(self, cur_len: Length) -> jax.Array:
        """Returns the token that is forced at this position, or -1."""
        position = cur_len - self.offset
        table = jnp.asarray(self.force_token_array, jnp.int32)
        inside = (position >= 0) & (position < len(table))
        return jnp.where(inside, table[jnp.clip(position, 0, len(table) - 1)], -1)


class FlaxExponentialDecayLengthPenalty(FlaxLogitsProcessor):
    """Raises finite scores of end tokens by ``abs(score) * (factor ** steps - 1)``.

    Args:
        exponential_decay_length_penalty: ``(start, factor)``. ``steps`` is the number of new tokens
            after the first ``start`` ones.
        eos_token_id: One end token or several.
        input_ids_seq_length: Length of the prompt.
    """

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: TokenIds,
        input_ids_seq_length: Length,
    ):
        start, self.factor = exponential_decay_length_penalty
        self.start = start + input_ids_seq_length
        self.tokens = self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        steps = jnp.maximum(cur_len - self.start, 0)
        growth = jnp.power(jnp.float32(self.factor), steps) - 1
        raised = scores + jnp.where(jnp.isfinite(scores), jnp.abs(scores) * growth, 0.0)
        return jnp.where(is_one_of(self.eos_token_id, scores.shape[-1]), raised, scores)


class FlaxSuppressTokensLogitsProcessor(FlaxLogitsProcessor):
    """Forbids ``suppress_tokens`` at every position."""

    def __init__(self, suppress_tokens: Sequence[int]):
        self.tokens = self.suppress_tokens = list(suppress_tokens)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.suppress_tokens, True)


class FlaxSuppressTokensAtBeginLogitsProcessor(FlaxLogitsProcessor):
    """Forbids ``begin_suppress_tokens`` at the position ``begin_index``."""

    def __init__(self, begin_suppress_tokens: Sequence[int], begin_index: Length):
        self.tokens = self.begin_suppress_tokens = list(begin_suppress_tokens)
        self.begin_index = begin_index

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.begin_suppress_tokens, cur_len == self.begin_index)


# -- processors of repetition and of sequences


class FlaxRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens that already occur less probable (Keskar et al., 2019).

    The positive scores of such tokens are divided by the penalty, and the negative scores are
    multiplied by the penalty. It does not matter how often a token occurs.

    Args:
        penalty: A float above 0. Values below 1 favor repetition.
        prompt_ignore_length: Number of leading tokens to ignore, an integer or an array `(rows,)`.
    """

    def __init__(self, penalty: float, prompt_ignore_length: Length | None = None):
        self.penalty, self.ignored = _positive_float(penalty), prompt_ignore_length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        positions = jnp.arange(input_ids.shape[1])[None]
        start = 0 if self.ignored is None else jnp.reshape(jnp.asarray(self.ignored), (-1, 1))
        valid = jnp.broadcast_to((positions >= start) & (positions < cur_len), input_ids.shape)
        return _penalize(scores, tokens_present(input_ids, valid, scores.shape[-1]), self.penalty)


class FlaxEncoderRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens of the input more probable, to penalize "hallucinations".

    Args:
        penalty: A float above 0. Values above 1 make the tokens more probable.
        encoder_input_ids: Input tokens, `(batch, width)`. In beam search, each input belongs to
            several rows of scores.
        length: Number of leading columns to use. Default: all.
    """

    def __init__(self, penalty: float, encoder_input_ids: jax.Array, length: Length | None = None):
        self.penalty = 1 / _positive_float(penalty)
        self.ids, self.length = jnp.asarray(encoder_input_ids), length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        length = self.ids.shape[1] if self.length is None else self.length
        valid = jnp.broadcast_to(jnp.arange(self.ids.shape[1])[None] < length, self.ids.shape)
        present = tokens_present(self.ids, valid, scores.shape[-1])
        present = jnp.repeat(present, scores.shape[0] // present.shape[0], axis=0)
        return _penalize(scores, present, self.penalty)


def _positive_float(penalty: float) -> float:
    valid = isinstance(penalty, float) and penalty > 0
    _check(valid, "penalty", "a strictly positive float", penalty)
    return penalty


def _penalize(scores: jax.Array, present: jax.Array, penalty: float) -> jax.Array:
    return jnp.where(present, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


class FlaxNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids tokens that would repeat an n-gram of ``ngram_size`` tokens of the same row."""

    def __init__(self, ngram_size: int):
        self.ngram_size = _integer("ngram_size", ngram_size)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid_ngrams(input_ids, cur_len, input_ids, cur_len, self.ngram_size, scores)


class FlaxEncoderNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids tokens that would complete an n-gram of the input.

    Args:
        encoder_ngram_size: Number of tokens per n-gram.
        encoder_input_ids: Input tokens, `(batch, width)` or `(width,)`.
        length: Number of leading columns to use. Default: all.
    """

    def __init__(
        self, encoder_ngram_size: int, encoder_input_ids: jax.Array, length: Length | None = None
    ) -> None:
        self.ngram_size = _integer("encoder_ngram_size", encoder_ngram_size)
        ids = jnp.asarray(encoder_input_ids)
        self.ids = ids[None] if ids.ndim == 1 else ids
        self.length = self.ids.shape[1] if length is None else length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        source = jnp.repeat(self.ids, scores.shape[0] // self.ids.shape[0], axis=0)
        return _forbid_ngrams(source, self.length, input_ids, cur_len, self.ngram_size, scores)


def _forbid_ngrams(
    source: jax.Array, length: Length, ids: jax.Array, cur_len: Length, size: int, scores: jax.Array
) -> jax.Array:
    """Forbids tokens that complete an n-gram of ``source``.

    Args:
        source: Rows in which n-grams are searched, `(rows, width)`.
        length: Number of filled columns of ``source``.
        ids: Token buffer, `(rows, width)`. Its last tokens are the beginning of an n-gram.
        cur_len: Number of filled columns of ``ids``.
        size: Number of tokens per n-gram.
        scores: Scores of the next token, `(rows, vocab_size)`.
    """
    windows = source.shape[1] - size + 1
    if windows < 1 or ids.shape[1] < size - 1:
        return scores
    matches = jnp.broadcast_to(jnp.arange(windows)[None] + size <= length, (len(ids), windows))
    if size > 1:
        end = lax.dynamic_slice_in_dim(ids, cur_len - (size - 1), size - 1, axis=1)
        for offset in range(size - 1):
            matches &= source[:, offset : offset + windows] == end[:, offset, None]
        matches &= cur_len >= size - 1
    banned = tokens_present(source[:, size - 1 :], matches, scores.shape[-1])
    return jnp.where(banned, -jnp.inf, scores)


class FlaxSequenceBiasLogitsProcessor(FlaxLogitsProcessor):
    """Adds biases to the scores of tokens that complete one of several token sequences.

    The bias of a sequence is added to the score of the last token of the sequence, if the row ends
    with all tokens of the sequence before the last one.

    Args:
        sequence_bias: A dict from tuples of tokens to floats, or a list of ``[tokens, bias]``.
    """

    def __init__(self, sequence_bias: Biases):
        items = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
        pairs: list[Any] = list(items) if isinstance(sequence_bias, (Mapping, list, tuple)) else []
        valid = pairs and all(len(pair) == 2 and isinstance(pair[1], float) for pair in pairs)
        valid = valid and all(isinstance(pair[0], (tuple, list)) and pair[0] for pair in pairs)
        requirement = (
            "a non-empty dict from tuples of tokens to floats, or a list of [tokens, float]"
        )
        _check(bool(valid), "sequence_bias", requirement, sequence_bias)
        self._set({token_ids("sequence_bias", tuple(tokens)): bias for tokens, bias in pairs})

    def _set(self, sequence_bias: dict[tuple[int, ...], float]) -> None:
        self.sequence_bias = sequence_bias
        self.tokens = sorted({sequence[-1] for sequence in sequence_bias})

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Adds the biases of all sequences that the next token can complete."""
        size = scores.shape[-1]
        outside = [i for sequence in self.sequence_bias for i in sequence if i >= size]
        if outside:
            raise ValueError(
                f"the vocabulary has {size} tokens, but `sequence_bias` (or `bad_words_ids`) "
                f"contains {outside}"
            )
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for sequence, value in self.sequence_bias.items():
            groups.setdefault(len(sequence), []).append((sequence, value))
        # Sequences of one token have a constant bias, which needs no array of the size of the
        # scores.
        always = np.zeros(size, np.float32)
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


class FlaxNoBadWordsLogitsProcessor(FlaxSequenceBiasLogitsProcessor):
    """Forbids the last token of each sequence in rows that end with the tokens before it.

    A sequence that consists of one end token is ignored. Use ``min_new_tokens`` to forbid end
    tokens.

    Args:
        bad_words_ids: A list of token sequences.
        eos_token_id: One end token or several.
    """

    def __init__(
        self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None
    ):
        words = list(bad_words_ids) if isinstance(bad_words_ids, (list, tuple)) else []
        valid = words and all(isinstance(word, (list, tuple)) and word for word in words)
        requirement = "a non-empty list of non-empty lists of tokens"
        _check(bool(valid), "bad_words_ids", requirement, bad_words_ids)
        ends = () if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
        sequences = [token_ids("bad_words_ids", tuple(word)) for word in words]
        self._set({s: -float("inf") for s in sequences if len(s) > 1 or s[0] not in ends})


class FlaxWhisperTimeStampLogitsProcessor(FlaxLogitsProcessor):
    """Applies Whisper's rules for timestamps, as in PyTorch.

    The first new token is a timestamp. Timestamps come in pairs and do not decrease. If all
    timestamps together are more probable than any text token, the next token is a timestamp.

    Args:
        generate_config: A generation configuration with Whisper's entries.
        model_config: The model's configuration.
        decoder_input_length: Length of the decoder's prompt.
        begin_index: Position of the first new token, which may be traced. By default it is computed
            from the length of the prompt as in Transformers 4.
    """

    def __init__(
        self,
        generate_config: GenerationConfig,
        model_config: PreTrainedConfig,
        decoder_input_length: int,
        begin_index: Length | None = None,
    ) -> None:
        config: Any = generate_config  # has entries that only Whisper defines
        end = config.eos_token_id
        self.eos_token_id = end[0] if isinstance(end, (list, tuple)) else end
        self.no_timestamps_token_id = config.no_timestamps_token_id
        self.timestamp_begin = config.no_timestamps_token_id + 1
        if begin_index is None:  # tokens for language and task follow the prompt
            begin_index = decoder_input_length + (3 if config.is_multilingual else 1)
        self.begin_index = begin_index
        limit = getattr(config, "max_initial_timestamp_index", None)
        self.max_initial_timestamp_index = model_config.vocab_size if limit is None else limit

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Forbids tokens that violate the rules."""
        begin, tokens = self.timestamp_begin, jnp.arange(scores.shape[-1])[None]
        is_stamp, new = tokens >= begin, cur_len - self.begin_index
        scores = jnp.where(tokens == self.no_timestamps_token_id, -jnp.inf, scores)
        last, second_last = (self._was_stamp(input_ids, cur_len, back) for back in (1, 2))
        last, second_last = last & (new >= 1), second_last | (new < 2)
        # After one timestamp, a second timestamp or the end token must follow.
        is_open = last & ~second_last
        scores = jnp.where((last & second_last)[:, None] & is_stamp, -jnp.inf, scores)
        scores = jnp.where(is_open[:, None] & (tokens < self.eos_token_id), -jnp.inf, scores)
        # Timestamps do not decrease, and a complete pair is not repeated.
        positions = jnp.arange(input_ids.shape[1])[None]
        is_timestamp = (
            (positions >= self.begin_index) & (positions < cur_len) & (input_ids >= begin)
        )
        latest = jnp.max(jnp.where(is_timestamp, positions, -1), axis=1, keepdims=True)
        latest_token = jnp.take_along_axis(input_ids, jnp.maximum(latest, 0), axis=1)
        first_allowed = jnp.where(
            latest < 0, begin, jnp.where(is_open[:, None], latest_token, latest_token + 1)
        )
        scores = jnp.where(is_stamp & (tokens < first_allowed), -jnp.inf, scores)
        late = tokens > begin + self.max_initial_timestamp_index
        scores = jnp.where((new == 0) & (late | ~is_stamp), -jnp.inf, scores)
        log_probabilities = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
        stamps = jax.nn.logsumexp(
            jnp.where(is_stamp, log_probabilities, -jnp.inf), axis=-1, keepdims=True
        )
        text = jnp.where(is_stamp, -jnp.inf, log_probabilities).max(-1, keepdims=True)
        return jnp.where((stamps > text) & ~is_stamp, -jnp.inf, scores)

    def _was_stamp(self, input_ids: jax.Array, cur_len: Length, back: int) -> jax.Array:
        index = jnp.maximum(cur_len - back, 0)
        column = lax.dynamic_slice_in_dim(input_ids, index, 1, axis=1)
        return column[:, 0] >= self.timestamp_begin


def whisper_timestamps(
    value: tuple[int, int, int | None], begin: Length
) -> FlaxWhisperTimeStampLogitsProcessor:
    """Returns the timestamp processor for new tokens from the position ``begin`` on.

    Args:
        value: The token ID of ``<|notimestamps|>``, the end token, and the largest index that the
            first timestamp may have, or `None` without a limit.
        begin: Position of the first new token.
    """
    no_timestamps, end, latest_start = value
    config: Any = types.SimpleNamespace(
        no_timestamps_token_id=no_timestamps,
        eos_token_id=end,
        vocab_size=1 << 30,
        max_initial_timestamp_index=latest_start,
    )
    return FlaxWhisperTimeStampLogitsProcessor(config, config, 0, begin)


# -- shared functions


def _check(valid: bool, name: str, requirement: str, value: object, hint: str = "") -> None:
    if not valid:
        raise ValueError(f"`{name}` has to be {requirement}, but is {value!r}{hint}")


def _integer(name: str, value: Any, lowest: int = 1) -> Any:
    """Returns ``value`` if it is traced or an integer of at least ``lowest``.

    Raises:
        ValueError: The value is something else.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    valid = isinstance(value, jax.Array) or (is_integer and value >= lowest)
    sign = "strictly positive" if lowest else "non-negative"
    _check(valid, name, f"a {sign} integer", value)
    return value


def token_ids(name: str, value: TokenIds) -> tuple[int, ...]:
    """Returns one or several token IDs as a tuple.

    Raises:
        ValueError: The value contains anything but non-negative integers.
    """
    ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    valid = all(hasattr(i, "__index__") and not isinstance(i, bool) and int(i) >= 0 for i in ids)
    _check(valid, name, "a (list of) non-negative integers", value)
    return tuple(map(int, ids))


def is_one_of(ids: Sequence[int], size: int) -> jax.Array:
    """Returns a boolean vector of length ``size``, true at ``ids``. Larger IDs are ignored."""
    mask = np.zeros(size, bool)  # NumPy, so that it is a constant of the compiled program
    mask[[i for i in ids if i < size]] = True
    return jnp.asarray(mask)


def tokens_present(ids: jax.Array, valid: jax.Array, vocab_size: int) -> jax.Array:
    """Returns which tokens of the vocabulary occur in each row, bool `(rows, vocab_size)`.

    Args:
        ids: Tokens, `(rows, width)`.
        valid: Which elements of ``ids`` to use, same shape.
        vocab_size: Size of the vocabulary.
    """
    token_indices = jnp.where(valid, ids, vocab_size)
    rows = jnp.arange(ids.shape[0])[:, None]
    present = jnp.zeros((ids.shape[0], vocab_size), bool)
    return present.at[rows, token_indices].set(True, mode="drop")


def ends_with(input_ids: jax.Array, cur_len: Length, sequences: jax.Array) -> jax.Array:
    """Returns which rows end with which of the sequences, bool `(rows, sequences)`.

    Args:
        input_ids: Token buffer, `(rows, width)`.
        cur_len: Number of tokens in the buffer.
        sequences: Sequences of equal length, `(sequences, length)`.
    """
    length = sequences.shape[1]
    if length > input_ids.shape[1]:
        return jnp.zeros((input_ids.shape[0], sequences.shape[0]), bool)
    end = lax.dynamic_slice_in_dim(input_ids, cur_len - length, length, axis=1)
    same = (end[:, None, :] == sequences[None]).all(-1)
    return same & (cur_len >= length)


__all__ = [name for name in globals() if name.startswith("Flax")]
