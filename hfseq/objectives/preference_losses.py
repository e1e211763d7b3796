"""Losses of preference optimization, as functions of log-probabilities.

A pair has a chosen and a rejected answer. The log-probability of an answer is the sum of the
log-probabilities of its tokens. The log-ratio of an answer is its log-probability under the policy,
which is the trained model, minus its log-probability under the reference model. All functions work
elementwise on float arrays with one entry per pair or per answer. They return losses of the same
shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

log_sigmoid, sigmoid = jax.nn.log_sigmoid, jax.nn.sigmoid


class Pairs(NamedTuple):
    """The log-ratios of pairs, and the lengths of their answers.

    Attributes:
        chosen: Log-ratio of each chosen answer, `(pairs,)`.
        rejected: Log-ratio of each rejected answer, `(pairs,)`.
        chosen_length: Number of tokens of each chosen answer, `(pairs,)`.
        rejected_length: Number of tokens of each rejected answer, `(pairs,)`.
    """

    chosen: jax.Array
    rejected: jax.Array
    chosen_length: jax.Array
    rejected_length: jax.Array

    @property
    def difference(self) -> jax.Array:
        """The log-ratio of the chosen answer minus that of the rejected answer."""
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> jax.Array:
        """The difference of the log-ratios per token.

        Each log-ratio is divided by the length of its answer.
        """
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


# -- direct preference optimization. The arguments are pairs, beta and the label smoothing.


def dpo_sigmoid(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """DPO (Rafailov et al., 2023, equation 7)."""
    return -log_sigmoid(beta * pairs.difference)


def dpo_hinge(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """SLiC (Zhao et al., 2023) with a margin of 1 / beta, as in Liu et al., 2023."""
    return jax.nn.relu(1 - beta * pairs.difference)


def dpo_ipo(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """IPO (Azar et al., 2023, equation 17) with log-ratios per token, as in TRL.

    `beta` is called tau in the paper.
    """
    return jnp.square(pairs.mean_difference - 1 / (2 * beta))


def dpo_robust(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """Robust DPO (Chowdhury et al., 2024), an unbiased estimate of DPO's loss for noisy labels.

    `smoothing` is the probability that chosen and rejected answers are swapped. The loss can be
    negative.
    """
    return (
        -(1 - smoothing) * log_sigmoid(beta * pairs.difference)
        + smoothing * log_sigmoid(-beta * pairs.difference)
    ) / (1 - 2 * smoothing)


def dpo_cdpo(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """Conservative DPO (Mitchell, 2023): cross-entropy with smoothed labels."""
    return -(1 - smoothing) * log_sigmoid(beta * pairs.difference) - smoothing * log_sigmoid(
        -beta * pairs.difference
    )


def dpo_apo_zero(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """APO-zero (D'Oosterlinck et al., 2024, equation 7).

    The loss makes chosen answers more probable and rejected answers less probable.
    """
    return 1 - sigmoid(beta * pairs.chosen) + sigmoid(beta * pairs.rejected)


def dpo_apo_down(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """APO-down (D'Oosterlinck et al., 2024, equation 8).

    The loss makes both answers less probable, and the rejected answer more so than the chosen one.
    """
    return sigmoid(beta * pairs.chosen) + 1 - sigmoid(beta * pairs.difference)


def dpo_sigmoid_norm(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """DPO with log-ratios per token, as in Tulu 3 (Lambert et al., 2024)."""
    return -log_sigmoid(beta * pairs.mean_difference)


def dpo_bco_pair(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """BCO on pairs (Jung et al., 2024) without the reward shift, as in MPO (Wang et al., 2024)."""
    return -log_sigmoid(beta * pairs.chosen) - log_sigmoid(-beta * pairs.rejected)


def dpo_nca_pair(pairs: Pairs, beta: float, smoothing: float = 0.0) -> jax.Array:
    """NCA on pairs (Chen et al., 2024)."""
    return (
        -log_sigmoid(beta * pairs.chosen)
        - 0.5 * log_sigmoid(-beta * pairs.chosen)
        - 0.5 * log_sigmoid(-beta * pairs.rejected)
    )


#: The losses of `--loss_type` by name. "sft" is not one of them, because it is a mean over tokens.
DPO: dict[str, Callable[[Pairs, float, float], jax.Array]] = {
    "sigmoid": dpo_sigmoid,
    "hinge": dpo_hinge,
    "ipo": dpo_ipo,
    "robust": dpo_robust,
    "cdpo": dpo_cdpo,
    "apo_zero": dpo_apo_zero,
    "apo_down": dpo_apo_down,
    "sigmoid_norm": dpo_sigmoid_norm,
    "bco_pair": dpo_bco_pair,
    "nca_pair": dpo_nca_pair,
}


#: The formulas of these losses for model cards. r₊ and r₋ are the log-ratios of the chosen and of
#: the rejected answer, Δ is their difference, and δ is the difference of the log-ratios per token.
#: β is beta, and ε is the label smoothing.
DPO_FORMULAS = {
    "sigmoid": "−log σ(βΔ)",
    "hinge": "max(0, 1 − βΔ)",
    "ipo": "(δ − 1/(2β))²",
    "robust": "(−(1−ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)",
    "cdpo": "−(1−ε) log σ(βΔ) − ε log σ(−βΔ)",
    "apo_zero": "1 − σ(βr₊) + σ(βr₋)",
    "apo_down": "σ(βr₊) + 1 − σ(βΔ)",
    "sigmoid_norm": "−log σ(βδ)",
    "bco_pair": "−log σ(βr₊) − log σ(−βr₋)",
    "nca_pair": "−log σ(βr₊) − ½ log σ(−βr₊) − ½ log σ(−βr₋)",
    "sft": "cross-entropy of the chosen answer",
}

# -- losses without a reference model


def log_odds_ratio(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """Returns the log odds ratio of ORPO (Hong et al., 2024, equation 7).

    Args:
        chosen: Mean log-probability per token of each chosen answer.
        rejected: Mean log-probability per token of each rejected answer.
    """
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


def log1mexp(x: jax.Array) -> jax.Array:
    """Returns log(1 - exp(x)) for negative `x` without loss of precision (Maechler, 2012)."""
    # The result for 0 would be -inf, and its gradient would be NaN.
    x = jnp.minimum(x, -jnp.finfo(x.dtype).tiny)
    is_small = x < -jnp.log(2.0)
    far, near = jnp.where(is_small, x, -1.0), jnp.where(is_small, -1.0, x)
    return jnp.where(is_small, jnp.log1p(-jnp.exp(far)), jnp.log(-jnp.expm1(near)))


class Likelihoods(NamedTuple):
    """The log-probabilities of pairs.

    Attributes:
        chosen: Log-probability of each chosen answer, `(pairs,)`.
        rejected: Log-probability of each rejected answer, `(pairs,)`.
        mean_chosen: Mean log-probability per token of each chosen answer.
        mean_rejected: Mean log-probability per token of each rejected answer.
    """

    chosen: jax.Array
    rejected: jax.Array
    mean_chosen: jax.Array
    mean_rejected: jax.Array


def alpha_reward(mean: jax.Array, alpha: float) -> jax.Array:
    """Returns the transformed log-probability per token of AlphaPO, (1 - p^(-alpha)) / alpha."""
    return -jnp.expm1(-alpha * mean) / alpha if alpha else mean


def cpo_loss(
    name: str, pairs: Likelihoods, beta: float, smoothing: float, gamma: float, alpha: float
) -> jax.Array:
    """Returns the preference term of CPO (Xu et al., 2024), SimPO or AlphaPO.

    Args:
        name: `sigmoid`, `hinge` or `ipo` for CPO, `simpo` (Meng et al., 2024), or `alphapo` (Gupta
            et al., 2025).
        pairs: The log-probabilities.
        beta: Factor of the log-probabilities.
        smoothing: Label smoothing of `sigmoid`.
        gamma: Target margin of `simpo` and `alphapo`.
        alpha: Exponent of the transformation of `alphapo`. With 0, the loss is that of SimPO.
    """
    difference = pairs.chosen - pairs.rejected
    mean_difference = pairs.mean_chosen - pairs.mean_rejected
    if name == "hinge":
        return jax.nn.relu(1 - beta * difference)
    if name == "ipo":
        return jnp.square(mean_difference - 1 / (2 * beta))
    if name == "sigmoid":
        return -(1 - smoothing) * log_sigmoid(beta * difference) - smoothing * log_sigmoid(
            -beta * difference
        )
    if name == "alphapo":
        mean_difference = alpha_reward(pairs.mean_chosen, alpha)
        mean_difference -= alpha_reward(pairs.mean_rejected, alpha)
    return -log_sigmoid(beta * mean_difference - gamma)


# -- single answers


def kto_loss(
    log_ratios: jax.Array,
    labels: jax.Array,
    kl: jax.Array,
    beta: float,
    weights: tuple[float, float],
) -> jax.Array:
    """Returns the loss of KTO (Ethayarajh et al., 2024, equation 8).

    Args:
        log_ratios: Log-ratio of each answer, `(answers,)`.
        labels: 1 for desirable answers and 0 for undesirable ones, `(answers,)`.
        kl: The estimate of the KL divergence between policy and reference, at least 0. No gradient
            passes through it.
        beta: Factor of the log-ratios.
        weights: Weights of desirable and undesirable answers.
    """
    desirable = weights[0] * (1 - sigmoid(beta * (log_ratios - kl)))
    undesirable = weights[1] * (1 - sigmoid(beta * (kl - log_ratios)))
    return jnp.where(labels > 0.5, desirable, undesirable)


def apo_zero_unpaired_loss(
    log_ratios: jax.Array, labels: jax.Array, beta: float, weights: tuple[float, float]
) -> jax.Array:
    """Returns the loss of APO-zero for single answers.

    The arguments are described in :func:`kto_loss`.
    """
    desirable = weights[0] * (1 - sigmoid(beta * log_ratios))
    undesirable = weights[1] * sigmoid(beta * log_ratios)
    return jnp.where(labels > 0.5, desirable, undesirable)


# -- reward models


def reward_loss(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | float, centering: float | None
) -> jax.Array:
    """Returns the Bradley-Terry loss of a reward model.

    Args:
        chosen: Reward of each chosen answer, `(pairs,)`.
        rejected: Reward of each rejected answer, `(pairs,)`.
        margin: The difference by which the reward of the chosen answer should exceed that of the
            rejected answer (Touvron et al., 2023, section 3.2.2).
        centering: Coefficient of the squared sum of both rewards, which keeps rewards near 0
            (Eisenstein et al., 2023). `None` for no such term.
    """
    loss = -log_sigmoid(chosen - rejected - margin)
    return loss if centering is None else loss + centering * jnp.square(chosen + rejected)
