"""Warpers of the sampling distribution.

None sorts the vocabulary or scatters into it, both slow: they search for a threshold instead. All
work on any set of candidates, so that after top-k the others need look at k tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfseq.generation.processors.base import FlaxLogitsWarper, positive_int

INFINITY = float("inf")


class FlaxTemperatureLogitsWarper(FlaxLogitsWarper):
    """Divides the scores by ``temperature``: below 1 sharper, above 1 flatter."""

    def __init__(self, temperature: float):
        if not isinstance(temperature, float) or not temperature > 0:
            hint = "; for greedy search set do_sample=False" if temperature == 0 else ""
            raise ValueError(
                f"`temperature` has to be a strictly positive float, but is {temperature!r}{hint}"
            )
        self.temperature = temperature

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Return ``scores / temperature``."""
        return scores / self.temperature


class _Filter(FlaxLogitsWarper):
    """A warper that sets the scores of improbable tokens to ``filter_value``."""

    def __init__(self, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1):
        self.filter_value = filter_value
        self.min_tokens_to_keep = positive_int("min_tokens_to_keep", min_tokens_to_keep)

    def keep(self, scores: jax.Array) -> jax.Array:
        """Return True where a token stays."""
        raise NotImplementedError

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Return ``scores`` with ``filter_value`` at what does not stay."""
        return jnp.where(self.keep(scores), scores, self.filter_value)

    def best(self, scores: jax.Array) -> jax.Array:
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

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = reached(jnp.where(bits <= middle, weights, 0.0).sum(-1, keepdims=True))
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.fori_loop(0, 32, halve, (low, high))
    return lax.bitcast_convert_type(high, jnp.float32)


class FlaxTopKLogitsWarper(_Filter):
    """Keeps the ``top_k`` highest scores (and those equal to the last of them)."""

    def __init__(
        self, top_k: int, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        self.top_k = max(positive_int("top_k", top_k), min_tokens_to_keep)

    def keep(self, scores: jax.Array) -> jax.Array:
        """Keep what reaches the ``top_k``-th score."""
        return scores >= kth_largest(scores, self.top_k)


class FlaxTopPLogitsWarper(_Filter):
    """Keeps the smallest set of tokens with a probability of ``top_p`` (Holtzman et al., 2019)."""

    def __init__(
        self, top_p: float, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        if not isinstance(top_p, float) or not 0 <= top_p <= 1:
            raise ValueError(f"`top_p` has to be a float > 0 and < 1, but is {top_p!r}")
        self.top_p = top_p

    def keep(self, scores: jax.Array) -> jax.Array:
        """Drop the least probable tokens while they sum up to no more than ``1 - top_p``."""
        probabilities = jax.nn.softmax(scores, axis=-1)
        dropped = jnp.float32(1 - self.top_p)
        least = smallest_reaching(probabilities, probabilities, lambda mass: mass > dropped)
        tied = probabilities == least
        # Equal ones are rare, and to count them takes a while.
        tied = lax.cond(
            (tied.sum(-1) > 1).any(), _needed, lambda *_: tied, probabilities, least, dropped
        )
        kept = (probabilities > least) | tied
        return kept if self.min_tokens_to_keep == 1 else kept | self.best(scores)


def _needed(probabilities: jax.Array, least: jax.Array, dropped: jax.Array) -> jax.Array:
    """Return which tokens of probability ``least`` stay: the last ones, as after a stable sort."""
    tied = probabilities == least
    mass = jnp.where(probabilities <= least, probabilities, 0.0).sum(-1, keepdims=True)
    after = tied.sum(-1, keepdims=True) - jnp.cumsum(tied, axis=-1)
    return tied & ((after == 0) | (mass - after * least > dropped))


class FlaxTopHLogitsWarper(FlaxLogitsWarper):
    """Keeps the most probable tokens up to a part ``top_h`` of the distribution's entropy.

    Only the 100 most probable tokens are considered, as in PyTorch.
    """

    candidates = 100

    def __init__(self, top_h: float, filter_value: float = -INFINITY):
        if not 0 < top_h <= 1:
            raise ValueError(f"`top_h` has to be a float > 0 and <= 1, but is {top_h!r}")
        self.top_h, self.filter_value = top_h, filter_value

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Keep tokens, best first, until their entropy exceeds the part."""
        best = lax.top_k(scores, min(self.candidates, scores.shape[-1]))[0]
        log_probabilities = jax.nn.log_softmax(best, axis=-1)
        probabilities = jnp.exp(log_probabilities)
        terms = jnp.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
        kept = jnp.cumsum(terms, -1) <= terms.sum(-1, keepdims=True) * self.top_h
        last = jnp.maximum(kept.sum(-1, keepdims=True) - 1, 0)
        threshold = jnp.take_along_axis(best, last, axis=-1)
        return jnp.where(scores >= threshold, scores, self.filter_value)


class FlaxMinPLogitsWarper(_Filter):
    """Keeps tokens with at least ``min_p`` times the probability of the most probable one."""

    def __init__(
        self, min_p: float, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        if not 0 <= min_p <= 1:
            raise ValueError(f"`min_p` has to be a float in the [0, 1] interval, but is {min_p!r}")
        self.min_p = min_p

    def keep(self, scores: jax.Array) -> jax.Array:
        """Compare probabilities with that of the best token."""
        probabilities = jax.nn.softmax(scores, axis=-1)
        enough = probabilities >= self.min_p * probabilities.max(-1, keepdims=True)
        return enough | self.best(scores)


class FlaxTypicalLogitsWarper(_Filter):
    """Keeps tokens of a surprise near the entropy, up to ``mass`` (Meister et al., 2022)."""

    def __init__(
        self, mass: float = 0.9, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        if not 0 < mass < 1:
            raise ValueError(f"`typical_p` has to be a float > 0 and < 1, but is {mass!r}")
        self.mass = mass

    def keep(self, scores: jax.Array) -> jax.Array:
        """Keep the tokens whose surprise is nearest to the entropy until the mass is reached."""
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        probabilities = jnp.exp(log_probabilities)
        terms = jnp.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
        distance = jnp.abs(-log_probabilities - terms.sum(-1, keepdims=True))
        wanted = jnp.float32(self.mass)
        furthest = smallest_reaching(distance, probabilities, lambda mass: mass >= wanted)
        nearest = -kth_largest(-distance, self.min_tokens_to_keep)
        return distance <= jnp.maximum(furthest, nearest)


class _Cutoff(_Filter):
    option: str

    def __init__(
        self, epsilon: float, filter_value: float = -INFINITY, min_tokens_to_keep: int = 1
    ) -> None:
        super().__init__(filter_value, min_tokens_to_keep)
        if not 0 < epsilon < 1:
            raise ValueError(f"`{self.option}` has to be a float > 0 and < 1, but is {epsilon!r}")
        self.epsilon = epsilon


class FlaxEpsilonLogitsWarper(_Cutoff):
    """Drops tokens with a probability below ``epsilon`` (Hewitt et al., 2022)."""

    option = "epsilon_cutoff"

    def keep(self, scores: jax.Array) -> jax.Array:
        """Compare probabilities with ``epsilon``."""
        return (jax.nn.softmax(scores, axis=-1) >= self.epsilon) | self.best(scores)


class FlaxEtaLogitsWarper(_Cutoff):
    """Drops tokens below a probability that falls with the entropy (Hewitt et al., 2022)."""

    option = "eta_cutoff"

    def keep(self, scores: jax.Array) -> jax.Array:
        """Compare probabilities with ``min(epsilon, sqrt(epsilon) * exp(-entropy))``."""
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        probabilities = jnp.exp(log_probabilities)
        terms = jnp.where(probabilities > 0, -probabilities * log_probabilities, 0.0)
        entropy = terms.sum(-1, keepdims=True)
        eta = jnp.minimum(self.epsilon, self.epsilon**0.5 * jnp.exp(-entropy))
        return (probabilities >= eta) | self.best(scores)
