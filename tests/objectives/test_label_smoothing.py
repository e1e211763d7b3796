"""Label smoothing: loss and explicit derivative compared with formulas and PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.data.batches import IGNORE_INDEX
from hfseq.objectives.cross_entropy import cross_entropy, smoothed_cross_entropy

pytestmark = pytest.mark.usefixtures("rows_together")
SIZE, S = 7, 0.1
LOGITS = np.random.default_rng(0).normal(0, 3, (2, 5, SIZE)).astype(np.float32)
LABELS = np.array([[0, 3, IGNORE_INDEX, 6, 0], [IGNORE_INDEX, 1, 2, IGNORE_INDEX, 5]])


def naive(logits, labels, smoothing):
    """Loss and derivative in float64, as Flax's WMT example defines the loss."""
    wide = logits.astype(np.float64)
    size = wide.shape[-1]
    target = np.full(wide.shape, smoothing / (size - 1))
    np.put_along_axis(target, np.maximum(labels, 0)[..., None], 1 - smoothing, axis=-1)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    entropy = -(target * np.log(np.where(target > 0, target, 1))).sum(-1)
    expected = labels != IGNORE_INDEX
    losses = -(target * log_p).sum(-1) - entropy
    return losses[expected].sum(), (np.exp(log_p) - target) * expected[..., None]


def ours(logits, labels=LABELS, size=None, smoothing=S):
    def total(x):
        return smoothed_cross_entropy(x, jnp.asarray(labels), size, smoothing)[0]

    return jax.jit(jax.value_and_grad(total))(jnp.asarray(logits))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_and_derivative_are_those_of_the_formula(smoothing):
    for a, b in zip(
        ours(LOGITS, smoothing=smoothing), naive(LOGITS, LABELS, smoothing), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_best_prediction_has_zero_loss():
    probabilities = np.full((1, 3, SIZE), S / (SIZE - 1))
    probabilities[0, np.arange(3), [2, 0, 6]] = 1 - S
    total, change = ours(np.log(probabilities), np.array([[2, 0, 6]]))
    assert abs(float(total)) < 1e-6 and np.abs(change).max() < 1e-6


def test_reported_sum_is_plain_cross_entropy():
    _, plain, count, right = smoothed_cross_entropy(jnp.asarray(LOGITS), LABELS, None, S)
    expected = cross_entropy(jnp.asarray(LOGITS), LABELS)
    assert float(plain) == pytest.approx(naive(LOGITS, LABELS, 0.0)[0], rel=1e-6)
    assert (float(plain), int(count), int(right)) == tuple(x.item() for x in expected)


def test_both_sums_can_be_differentiated():
    def mixed(x):
        total, plain, *_ = smoothed_cross_entropy(x, LABELS, None, S)
        return total + 2 * plain

    expected = naive(LOGITS, LABELS, S)[1] + 2 * naive(LOGITS, LABELS, 0.0)[1]
    np.testing.assert_allclose(jax.grad(mixed)(jnp.asarray(LOGITS)), expected, rtol=1e-5, atol=2e-6)


def test_padding_of_the_vocabulary_gets_no_share():
    padded = np.concatenate([LOGITS, np.full((2, 5, 3), 50.0, np.float32)], axis=-1)
    (total, change), (expected, targets) = ours(padded, size=SIZE), ours(LOGITS)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(change[..., :SIZE], targets, rtol=1e-5, atol=1e-6)
    assert not change[..., SIZE:].any()


def test_a_large_vocabulary_in_bfloat16_keeps_its_digits():
    draw = np.random.default_rng(1)
    logits = jnp.asarray(draw.normal(5, 4, (4, 32_000)), jnp.bfloat16)
    labels = draw.integers(0, 32_000, 4)
    total, change = ours(logits, labels)
    expected, targets = naive(np.asarray(logits, np.float32), labels, S)
    assert float(total) == pytest.approx(expected, rel=1e-6) and change.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(change, np.float32), targets, rtol=1e-2, atol=1e-7)


def test_pytorch_spreads_over_all_entries_and_so_smooths_a_little_less():
    torch = pytest.importorskip("torch")
    logits = torch.tensor(LOGITS, requires_grad=True)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=S, reduction="sum", ignore_index=IGNORE_INDEX)
    loss(logits.reshape(-1, SIZE), torch.tensor(LABELS).reshape(-1)).backward()
    same = S * (SIZE - 1) / SIZE
    np.testing.assert_allclose(ours(LOGITS, smoothing=same)[1], logits.grad, rtol=1e-5, atol=1e-6)


def test_backward_pass_keeps_only_the_logits():
    _, pull = jax.vjp(lambda x: smoothed_cross_entropy(x, LABELS, None, S)[0], jnp.asarray(LOGITS))
    remaining = [leaf.size for leaf in jax.tree.leaves(pull)]
    assert sum(size >= LOGITS.size for size in remaining) == 1
