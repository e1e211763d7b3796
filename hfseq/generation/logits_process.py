"""Logits processors and warpers: functions that change the scores of the next token.

Warpers neither sort the vocabulary nor scatter into it, both slow: they search for a threshold. All
work on any set of candidates, so that after top-k the others need look at k tokens only.
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

#: A number of tokens: known, or an array, inside of the compiled loop a tracer.
Length = int | jax.Array
TokenIds = int | Sequence[int]
Biases = Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]]


class FlaxLogitsProcessor(ABC):
    """Changes the scores of the next token.

    It is called with ``input_ids`` (rows, width), a buffer of which only the first ``cur_len``
    columns hold tokens; ``scores`` (rows, vocabulary) in float32, logits in sampling and greedy
    search and log-probabilities in beam search; and ``cur_len``, a number or, inside the compiled
    loop, a tracer. It returns new scores and must be traceable: ``jnp.where`` instead of ``if``.
    """

    #: The tokens whose scores it may change, in any row; ``None`` if that is unknown.
    tokens: Sequence[int] | None = None

    @abstractmethod
    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Return the new scores."""

    def affected_tokens(self) -> Sequence[int] | None:
        """Return :attr:`tokens`; the search looks at the others once, before all processors."""
        return self.tokens

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Tell whether all tokens but the touched ones become impossible at this step."""
        return False


class FlaxLogitsWarper(FlaxLogitsProcessor):
    """A processor that reshapes the distribution and so is only used when sampling."""


class FlaxLogitsProcessorList(list):
    """Processors that are applied one after the other."""

    def __call__(
        self, input_ids: jax.Array, scores: jax.Array, cur_len: Length, **kwargs: Any
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


# -- warpers


class FlaxTemperatureLogitsWarper(FlaxLogitsWarper):
    """Divides the scores by ``temperature``: below 1 sharper, above 1 flatter."""

    def __init__(self, temperature: float):
        hint = "; for greedy search set do_sample=False" if temperature == 0 else ""
        good = isinstance(temperature, float) and temperature > 0
        _check(good, "temperature", "a strictly positive float", temperature, hint)
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
        """Return True at the ``min_tokens_to_keep`` highest scores."""
        return scores >= kth_largest(scores, self.min_tokens_to_keep)


def kth_largest(scores: jax.Array, k: int) -> jax.Array:
    """Return the ``k``-th largest score of each row, (rows, 1); the smallest if there are fewer."""
    if k == 1:
        return scores.max(-1, keepdims=True)
    return lax.top_k(scores, min(k, scores.shape[-1]))[0][:, -1:]


def smallest_reaching(
    values: jax.Array, weights: jax.Array, reached: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return the smallest of ``values`` so that the weights up to it are enough, (rows, 1).

    ``values`` and ``weights`` are (rows, n) and not negative; ``reached`` judges sums of weights.
    The largest value comes back where not even all are enough. The bits of such floats are in
    order as integers, so 31 halvings find it; sorting a vocabulary takes 20 times as long on a CPU.
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
    """Return log-probabilities, probabilities and what each token adds to the entropy."""
    log_probabilities = jax.nn.log_softmax(scores, axis=-1)
    probabilities = jnp.exp(log_probabilities)
    terms = jnp.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
    return log_probabilities, probabilities, terms


class FlaxTopKLogitsWarper(_Filter):
    """Keeps the ``top_k`` highest scores (and those equal to the last of them)."""

    def __init__(
        self, top_k: int, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        self.top_k = max(_integer("top_k", top_k), min_tokens_to_keep)

    def _keep(self, scores: jax.Array) -> jax.Array:
        return scores >= kth_largest(scores, self.top_k)


class FlaxTopPLogitsWarper(_Filter):
    """Keeps the smallest set of tokens with a probability of ``top_p`` (Holtzman et al., 2019)."""

    def __init__(
        self, top_p: float, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        good = isinstance(top_p, float) and 0 <= top_p <= 1
        _check(good, "top_p", "a float > 0 and < 1", top_p)
        self.top_p = top_p

    def _keep(self, scores: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(scores, axis=-1)
        dropped = jnp.float32(1 - self.top_p)
        least = smallest_reaching(probabilities, probabilities, lambda mass: mass > dropped)
        tied = probabilities == least

        def last_of(probabilities: jax.Array, least: jax.Array, dropped: jax.Array) -> jax.Array:
            """Of equal ones the last stay, as after a stable sort."""
            tied = probabilities == least
            mass = jnp.where(probabilities <= least, probabilities, 0.0).sum(-1, keepdims=True)
            after = tied.sum(-1, keepdims=True) - jnp.cumsum(tied, axis=-1)
            return tied & ((after == 0) | (mass - after * least > dropped))

        # Equal ones are rare, and to count them takes a while.
        tied = lax.cond(
            (tied.sum(-1) > 1).any(), last_of, lambda *_: tied, probabilities, least, dropped
        )
        kept = (probabilities > least) | tied
        return kept if self.min_tokens_to_keep == 1 else kept | self._best(scores)


class FlaxTopHLogitsWarper(FlaxLogitsWarper):
    """Keeps the most probable tokens, best first, up to a part ``top_h`` of the entropy.

    Only the 100 most probable tokens are considered, as in PyTorch.
    """

    candidates = 100

    def __init__(self, top_h: float, filter_value: float = -float("inf")):
        _check(0 < top_h <= 1, "top_h", "a float > 0 and <= 1", top_h)
        self.top_h, self.filter_value = top_h, filter_value

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        best = lax.top_k(scores, min(self.candidates, scores.shape[-1]))[0]
        _, _, terms = _entropy_terms(best)
        kept = jnp.cumsum(terms, -1) <= terms.sum(-1, keepdims=True) * self.top_h
        last = jnp.maximum(kept.sum(-1, keepdims=True) - 1, 0)
        threshold = jnp.take_along_axis(best, last, axis=-1)
        return jnp.where(scores >= threshold, scores, self.filter_value)


class FlaxMinPLogitsWarper(_Filter):
    """Keeps tokens with at least ``min_p`` times the probability of the most probable one."""

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
    """Keeps tokens of a surprise near the entropy, up to ``mass`` (Meister et al., 2022)."""

    def __init__(
        self, mass: float = 0.9, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        _check(0 < mass < 1, "typical_p", "a float > 0 and < 1", mass)
        self.mass = mass

    def _keep(self, scores: jax.Array) -> jax.Array:
        log_probabilities, probabilities, terms = _entropy_terms(scores)
        distance = jnp.abs(-log_probabilities - terms.sum(-1, keepdims=True))
        wanted = jnp.float32(self.mass)
        furthest = smallest_reaching(distance, probabilities, lambda mass: mass >= wanted)
        nearest = -kth_largest(-distance, self.min_tokens_to_keep)
        return distance <= jnp.maximum(furthest, nearest)


class FlaxEpsilonLogitsWarper(_Filter):
    """Drops tokens with a probability below ``epsilon`` (Hewitt et al., 2022)."""

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
    """Drops tokens below a probability that falls with the entropy (Hewitt et al., 2022)."""

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
    """Turns scores into log-probabilities."""

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return jax.nn.log_softmax(scores, axis=-1)


def _forbid(scores: jax.Array, tokens: Sequence[int], when: bool | jax.Array) -> jax.Array:
    return jnp.where(is_one_of(tokens, scores.shape[-1]) & when, -jnp.inf, scores)


class FlaxMinLengthLogitsProcessor(FlaxLogitsProcessor):
    """Forbids the end token before ``min_length`` tokens, the prompt counted."""

    def __init__(self, min_length: Length, eos_token_id: TokenIds):
        self.min_length = _integer("min_length", min_length, 0)
        self.tokens = self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.eos_token_id, cur_len < self.min_length)


class FlaxMinNewTokensLengthLogitsProcessor(FlaxMinLengthLogitsProcessor):
    """Forbids the end token before ``min_new_tokens`` tokens after the prompt."""

    def __init__(self, prompt_length_to_skip: Length, min_new_tokens: int, eos_token_id: TokenIds):
        self.prompt_length_to_skip = _integer("prompt_length_to_skip", prompt_length_to_skip, 0)
        self.min_new_tokens = _integer("min_new_tokens", min_new_tokens, 0)
        super().__init__(prompt_length_to_skip + min_new_tokens, eos_token_id)


class _Forced(FlaxLogitsProcessor):
    """Makes ``tokens`` the only possible ones at the steps that :meth:`forces` names."""

    tokens: tuple[int, ...]

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        only = jnp.where(is_one_of(self.tokens, scores.shape[-1]), 0.0, -jnp.inf)
        return jnp.where(self.forces(cur_len), only, scores)


class FlaxForcedBOSTokenLogitsProcessor(_Forced):
    """Makes ``bos_token_id`` the token after a prompt of one token (the decoder start)."""

    def __init__(self, bos_token_id: int):
        self.bos_token_id, self.tokens = bos_token_id, token_ids("bos_token_id", bos_token_id)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Force it at ``cur_len == 1``."""
        return cur_len == 1


class FlaxForcedEOSTokenLogitsProcessor(_Forced):
    """Makes ``eos_token_id`` the last token when ``max_length`` is reached."""

    def __init__(self, max_length: Length, eos_token_id: TokenIds):
        self.max_length = max_length
        self.tokens = self.eos_token_id = token_ids("eos_token_id", eos_token_id)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Force it at ``cur_len == max_length - 1``."""
        return cur_len == self.max_length - 1


class FlaxForceTokensLogitsProcessor(FlaxLogitsProcessor):
    """Forces tokens at places: pairs (place, token); ``offset`` is added to the places."""

    def __init__(
        self,
        force_token_map: Mapping[int, int | None] | Sequence[Sequence[int | None]],
        offset: Length = 0,
    ):
        pairs: dict[Any, int | None] = dict(force_token_map)  # type: ignore[arg-type]
        forced = {int(place): -1 if token is None else int(token) for place, token in pairs.items()}
        self.force_token_array = [forced.get(n, -1) for n in range(max(forced, default=-1) + 1)]
        self.tokens, self.offset = [n for n in self.force_token_array if n >= 0], offset

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        token = self._token(cur_len)
        only = jnp.where(jnp.arange(scores.shape[-1]) == token, 0.0, -jnp.inf)
        return jnp.where(token >= 0, only, scores)

    def forces(self, cur_len: Length) -> bool | jax.Array:
        """Tell whether the place has a token."""
        return self._token(cur_len) >= 0

    def _token(self, cur_len: Length) -> jax.Array:
        """Return the token of the place, or -1."""
        place = cur_len - self.offset
        table = jnp.asarray(self.force_token_array, jnp.int32)
        inside = (place >= 0) & (place < len(table))
        return jnp.where(inside, table[jnp.clip(place, 0, len(table) - 1)], -1)


class FlaxExponentialDecayLengthPenalty(FlaxLogitsProcessor):
    """Raises finite scores of the end by ``abs(score) * (factor ** steps - 1)``.

    ``steps`` are the new tokens after the first ``start``.
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
    """Forbids ``suppress_tokens`` everywhere."""

    def __init__(self, suppress_tokens: Sequence[int]):
        self.tokens = self.suppress_tokens = list(suppress_tokens)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.suppress_tokens, True)


class FlaxSuppressTokensAtBeginLogitsProcessor(FlaxLogitsProcessor):
    """Forbids ``begin_suppress_tokens`` as the token at place ``begin_index``."""

    def __init__(self, begin_suppress_tokens: Sequence[int], begin_index: Length):
        self.tokens = self.begin_suppress_tokens = list(begin_suppress_tokens)
        self.begin_index = begin_index

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid(scores, self.begin_suppress_tokens, cur_len == self.begin_index)


# -- processors of repetition and of sequences


class FlaxRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens that are there already less probable (Keskar et al., 2019), each once.

    Positive scores are divided and negative ones multiplied by ``penalty``. The first
    ``prompt_ignore_length`` tokens, a number or an array (rows,), do not count.
    """

    def __init__(self, penalty: float, prompt_ignore_length: Length | None = None):
        self.penalty, self.ignored = _positive_float(penalty), prompt_ignore_length

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        places = jnp.arange(input_ids.shape[1])[None]
        start = 0 if self.ignored is None else jnp.reshape(jnp.asarray(self.ignored), (-1, 1))
        valid = jnp.broadcast_to((places >= start) & (places < cur_len), input_ids.shape)
        return _penalize(scores, tokens_present(input_ids, valid, scores.shape[-1]), self.penalty)


class FlaxEncoderRepetitionPenaltyLogitsProcessor(FlaxLogitsProcessor):
    """Makes tokens of the input more probable: a penalty on what is not there ("hallucination").

    ``encoder_input_ids`` is (batch, width), of which ``length`` columns count (all by default); a
    row of it serves several rows of scores where there are beams.
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
    good = isinstance(penalty, float) and penalty > 0
    _check(good, "penalty", "a strictly positive float", penalty)
    return penalty


def _penalize(scores: jax.Array, present: jax.Array, penalty: float) -> jax.Array:
    return jnp.where(present, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


class FlaxNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids every n-gram of ``ngram_size`` tokens that the row already has."""

    def __init__(self, ngram_size: int):
        self.ngram_size = _integer("ngram_size", ngram_size)

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        return _forbid_ngrams(input_ids, cur_len, input_ids, cur_len, self.ngram_size, scores)


class FlaxEncoderNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Forbids every n-gram of the input; ``length`` columns of ``encoder_input_ids`` count."""

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
    """Forbid the last tokens of those n-grams of ``source`` that begin as ``ids`` ends."""
    windows = source.shape[1] - size + 1
    if windows < 1 or ids.shape[1] < size - 1:
        return scores
    matches = jnp.broadcast_to(jnp.arange(windows)[None] + size <= length, (len(ids), windows))
    if size > 1:
        end = lax.dynamic_slice_in_dim(ids, cur_len - (size - 1), size - 1, axis=1)
        for place in range(size - 1):
            matches &= source[:, place : place + windows] == end[:, place, None]
        matches &= cur_len >= size - 1
    banned = tokens_present(source[:, size - 1 :], matches, scores.shape[-1])
    return jnp.where(banned, -jnp.inf, scores)


class FlaxSequenceBiasLogitsProcessor(FlaxLogitsProcessor):
    """Adds a bias to the last token of a sequence when the others have just been generated.

    ``sequence_bias`` maps tuples of tokens to floats, or is a list of ``[tokens, bias]``.
    """

    def __init__(self, sequence_bias: Biases):
        given = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
        pairs: list[Any] = list(given) if isinstance(sequence_bias, (Mapping, list, tuple)) else []
        good = pairs and all(len(pair) == 2 and isinstance(pair[1], float) for pair in pairs)
        good = good and all(isinstance(pair[0], (tuple, list)) and pair[0] for pair in pairs)
        wanted = "a non-empty dict from tuples of tokens to floats, or a list of [tokens, float]"
        _check(bool(good), "sequence_bias", wanted, sequence_bias)
        self._set({token_ids("sequence_bias", tuple(tokens)): bias for tokens, bias in pairs})

    def _set(self, sequence_bias: dict[tuple[int, ...], float]) -> None:
        self.sequence_bias = sequence_bias
        self.tokens = sorted({sequence[-1] for sequence in sequence_bias})

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Add the biases of all sequences that the next token may complete."""
        size = scores.shape[-1]
        outside = [i for sequence in self.sequence_bias for i in sequence if i >= size]
        if outside:
            raise ValueError(
                f"the vocabulary has {size} tokens, but `sequence_bias` (or `bad_words_ids`) names "
                f"{outside}"
            )
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for sequence, value in self.sequence_bias.items():
            groups.setdefault(len(sequence), []).append((sequence, value))
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


class FlaxNoBadWordsLogitsProcessor(FlaxSequenceBiasLogitsProcessor):
    """Forbids sequences of tokens: the last token of each after the others.

    A single end token is not forbidden: use ``min_new_tokens`` for that.
    """

    def __init__(
        self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None
    ):
        words = list(bad_words_ids) if isinstance(bad_words_ids, (list, tuple)) else []
        good = words and all(isinstance(word, (list, tuple)) and word for word in words)
        wanted = "a non-empty list of non-empty lists of tokens"
        _check(bool(good), "bad_words_ids", wanted, bad_words_ids)
        ends = () if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
        sequences = [token_ids("bad_words_ids", tuple(word)) for word in words]
        self._set({s: -float("inf") for s in sequences if len(s) > 1 or s[0] not in ends})


class FlaxWhisperTimeStampLogitsProcessor(FlaxLogitsProcessor):
    """Lets timestamps come first, in pairs and in order, and when they are more probable than text.

    The rules of Whisper's authors, as PyTorch has them. New tokens begin at ``begin_index``, which
    may be traced; without it they begin where Transformers 4 thought.
    """

    def __init__(
        self,
        generate_config: GenerationConfig,
        model_config: PreTrainedConfig,
        decoder_input_length: int,
        begin_index: Length | None = None,
    ) -> None:
        config: Any = generate_config  # with Whisper's own entries
        end = config.eos_token_id
        self.eos_token_id = end[0] if isinstance(end, (list, tuple)) else end
        self.no_timestamps_token_id = config.no_timestamps_token_id
        self.timestamp_begin = config.no_timestamps_token_id + 1
        if begin_index is None:  # language and task come between
            begin_index = decoder_input_length + (3 if config.is_multilingual else 1)
        self.begin_index = begin_index
        limit = getattr(config, "max_initial_timestamp_index", None)
        self.max_initial_timestamp_index = model_config.vocab_size if limit is None else limit

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Length) -> jax.Array:
        """Forbid what breaks the rules."""
        begin, tokens = self.timestamp_begin, jnp.arange(scores.shape[-1])[None]
        stamp, new = tokens >= begin, cur_len - self.begin_index
        scores = jnp.where(tokens == self.no_timestamps_token_id, -jnp.inf, scores)
        last, before = (self._was_stamp(input_ids, cur_len, back) for back in (1, 2))
        last, before = last & (new >= 1), before | (new < 2)
        opened = last & ~before  # its partner, or the end, must follow
        scores = jnp.where((last & before)[:, None] & stamp, -jnp.inf, scores)
        scores = jnp.where(opened[:, None] & (tokens < self.eos_token_id), -jnp.inf, scores)
        # Time does not run backwards, and a pair closed is not repeated.
        places = jnp.arange(input_ids.shape[1])[None]
        seen = (places >= self.begin_index) & (places < cur_len) & (input_ids >= begin)
        latest = jnp.max(jnp.where(seen, places, -1), axis=1, keepdims=True)
        at = jnp.take_along_axis(input_ids, jnp.maximum(latest, 0), axis=1)
        least = jnp.where(latest < 0, begin, jnp.where(opened[:, None], at, at + 1))
        scores = jnp.where(stamp & (tokens < least), -jnp.inf, scores)
        late = tokens > begin + self.max_initial_timestamp_index
        scores = jnp.where((new == 0) & (late | ~stamp), -jnp.inf, scores)
        log_probabilities = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
        stamps = jax.nn.logsumexp(
            jnp.where(stamp, log_probabilities, -jnp.inf), axis=-1, keepdims=True
        )
        text = jnp.where(stamp, -jnp.inf, log_probabilities).max(-1, keepdims=True)
        return jnp.where((stamps > text) & ~stamp, -jnp.inf, scores)

    def _was_stamp(self, input_ids: jax.Array, cur_len: Length, back: int) -> jax.Array:
        place = jnp.maximum(cur_len - back, 0)
        column = lax.dynamic_slice_in_dim(input_ids, place, 1, axis=1)
        return column[:, 0] >= self.timestamp_begin


def whisper_timestamps(
    value: tuple[int, int, int | None], begin: Length
) -> FlaxWhisperTimeStampLogitsProcessor:
    """Return the rules of timestamps for new tokens from ``begin`` on.

    ``value`` are the tokens of no timestamps and of the end, and how late the first one may be.
    """
    no_timestamps, end, latest_start = value
    config: Any = types.SimpleNamespace(
        no_timestamps_token_id=no_timestamps,
        eos_token_id=end,
        vocab_size=1 << 30,
        max_initial_timestamp_index=latest_start,
    )
    return FlaxWhisperTimeStampLogitsProcessor(config, config, 0, begin)


# -- what they share


def _check(good: bool, name: str, wanted: str, value: object, hint: str = "") -> None:
    if not good:
        raise ValueError(f"`{name}` has to be {wanted}, but is {value!r}{hint}")


def _integer(name: str, value: Any, lowest: int = 1) -> Any:
    """Return ``value`` if it is an integer of at least ``lowest``, or traced; else ValueError."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    good = isinstance(value, jax.Array) or (whole and value >= lowest)
    kind = "strictly positive" if lowest else "non-negative"
    _check(good, name, f"a {kind} integer", value)
    return value


def token_ids(name: str, value: TokenIds) -> tuple[int, ...]:
    """Return one or several token ids as a tuple; ValueError if they are not natural numbers."""
    ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    good = all(hasattr(i, "__index__") and not isinstance(i, bool) and int(i) >= 0 for i in ids)
    _check(good, name, "a (list of) non-negative integers", value)
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


def ends_with(input_ids: jax.Array, cur_len: Length, sequences: jax.Array) -> jax.Array:
    """Return (rows, sequences): whether the first ``cur_len`` tokens of a row end with a sequence.

    ``sequences`` is (sequences, length), all of one length.
    """
    length = sequences.shape[1]
    if length > input_ids.shape[1]:
        return jnp.zeros((input_ids.shape[0], sequences.shape[0]), bool)
    end = lax.dynamic_slice_in_dim(input_ids, cur_len - length, length, axis=1)
    same = (end[:, None, :] == sequences[None]).all(-1)
    return same & (cur_len >= length)


__all__ = [name for name in globals() if name.startswith("Flax")]
