"""Losses of preference optimization, compared with their formulas in NumPy (float64)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.data.arguments import DPO_LOSSES
from hfseq.objectives import preference_losses as losses

DRAW = np.random.default_rng(0)
CHOSEN, REJECTED = DRAW.normal(size=(2, 9)) * 8
LENGTHS = DRAW.integers(1, 20, (2, 9)).astype(float)
BETA, SMOOTHING = 0.3, 0.2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def expected_dpo(name):
    r, s = BETA * CHOSEN, BETA * REJECTED
    mean = CHOSEN / LENGTHS[0] - REJECTED / LENGTHS[1]
    right, wrong = -log_sigmoid(r - s), -log_sigmoid(s - r)
    return {
        "sigmoid": right,
        "hinge": np.maximum(0, 1 - (r - s)),
        "ipo": (mean - 1 / (2 * BETA)) ** 2,
        "robust": ((1 - SMOOTHING) * right - SMOOTHING * wrong) / (1 - 2 * SMOOTHING),
        "cdpo": (1 - SMOOTHING) * right + SMOOTHING * wrong,
        "apo_zero": 1 - sigmoid(r) + sigmoid(s),
        "apo_down": sigmoid(r) + 1 - sigmoid(r - s),
        "sigmoid_norm": -log_sigmoid(BETA * mean),
        "bco_pair": -log_sigmoid(r) - log_sigmoid(-s),
        "nca_pair": -log_sigmoid(r) - 0.5 * log_sigmoid(-r) - 0.5 * log_sigmoid(-s),
    }[name]


def arrays(*values):
    return (jnp.asarray(value, jnp.float32) for value in values)


@pytest.mark.parametrize("name", [name for name in DPO_LOSSES if name != "sft"])
def test_dpo_losses_equal_their_formulas(name):
    pairs = losses.Pairs(*arrays(CHOSEN, REJECTED, *LENGTHS))
    result = losses.DPO[name](pairs, BETA, SMOOTHING)
    np.testing.assert_allclose(result, expected_dpo(name), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "constant"),
    [("sigmoid", np.log(2)), ("hinge", 1), ("ipo", 1 / (4 * BETA**2)), ("apo_zero", 1),
     ("apo_down", 1)],
)  # fmt: skip
def test_losses_of_a_model_that_equals_its_reference_are_constants(name, constant):
    pairs = losses.Pairs(*arrays(np.zeros(2), np.zeros(2), LENGTHS[0, :2], LENGTHS[1, :2]))
    np.testing.assert_allclose(losses.DPO[name](pairs, BETA, 0.0), constant, rtol=1e-6)


def test_the_odds_ratio_is_exact_for_small_and_large_probabilities():
    first, second = -np.array([1e-6, 0.2, 0.7, 5, 60]), -np.array([3.0, 1e-4, 0.6, 80, 0.1])
    expected = (first - np.log(-np.expm1(first))) - (second - np.log(-np.expm1(second)))
    result = losses.log_odds_ratio(*arrays(first, second))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    gradient = jax.grad(lambda x: losses.log1mexp(x).sum())(jnp.array([0.0, -1e-7, -0.5, -50.0]))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo", "alphapo"])
def test_losses_without_a_reference_equal_their_formulas(name):
    chosen, rejected = -np.abs(CHOSEN), -np.abs(REJECTED)
    means = chosen / LENGTHS[0], rejected / LENGTHS[1]
    gamma, alpha = 0.4, 0.25
    difference = chosen - rejected
    mean = means[0] - means[1]
    transformed = (np.exp(-alpha * means[1]) - np.exp(-alpha * means[0])) / alpha
    expected = {
        "sigmoid": -(1 - SMOOTHING) * log_sigmoid(BETA * difference)
        - SMOOTHING * log_sigmoid(-BETA * difference),
        "hinge": np.maximum(0, 1 - BETA * difference),
        "ipo": (mean - 1 / (2 * BETA)) ** 2,
        "simpo": -log_sigmoid(BETA * mean - gamma),
        "alphapo": -log_sigmoid(BETA * transformed - gamma),
    }[name]
    pairs = losses.Likelihoods(*arrays(chosen, rejected, *means))
    result = losses.cpo_loss(name, pairs, BETA, SMOOTHING, gamma, alpha)
    np.testing.assert_allclose(result, expected, rtol=5e-6, atol=1e-6)


def test_losses_of_single_answers_equal_their_formulas():
    labels, kl, weights = (CHOSEN > 0).astype(float), 0.7, (1.5, 0.5)
    good = weights[0] * (1 - sigmoid(BETA * (CHOSEN - kl)))
    bad = weights[1] * (1 - sigmoid(BETA * (kl - CHOSEN)))
    ratios, signs = arrays(CHOSEN, labels)
    result = losses.kto_loss(ratios, signs, jnp.float32(kl), BETA, weights)
    np.testing.assert_allclose(result, np.where(labels > 0, good, bad), rtol=1e-5, atol=1e-6)
    zero = losses.apo_zero_unpaired_loss(ratios, signs, BETA, (1.0, 1.0))
    expected = np.where(labels > 0, 1 - sigmoid(BETA * CHOSEN), sigmoid(BETA * CHOSEN))
    np.testing.assert_allclose(zero, expected, rtol=1e-5, atol=1e-6)


def test_the_reward_loss_has_a_margin_and_centers_rewards():
    margin = DRAW.random(9)
    expected = -log_sigmoid(CHOSEN - REJECTED - margin) + 0.01 * (CHOSEN + REJECTED) ** 2
    result = losses.reward_loss(*arrays(CHOSEN, REJECTED, margin), 0.01)
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=1e-6)
