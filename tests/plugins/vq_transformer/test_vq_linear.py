"""Block-wise attention against the quadratic oracle: all heads, reductions and sizes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn import trees
from tests.plugins.vq_transformer import vq_oracle as oracle
from tests.plugins.vq_transformer.vq_cases import (
    HEADS,
    REDUCTIONS,
    assert_gradients_close,
    ids,
    max_difference,
    model,
    statistics,
    token_losses,
    variables,
)
from tests.support.tiers import first

ORACLES = {}
# Blocks, windows and lengths: shorter or longer than each other, with and without remainder.
FEW = {
    ("shga", "recurrent"): (3, 4, 11),
    ("shga", "serial"): (5, 2, 13),
    ("shga", "matmul"): (4, 4, 12),
    ("shga", "associative_scan"): (2, 5, 12),
    ("mha", "recurrent"): (8, 20, 7),
    ("mqa", "matmul"): (3, 0, 10),
    ("gqa", "associative_scan"): (3, 3, 13),
    ("gqa", "recurrent"): (1, 2, 5),
}
LENGTH = 13


def oracle_values(head, block, window, length, **changes):
    """Returns the oracle's loss, result and gradients for the first `length` tokens."""
    key = (head, *sorted(changes.items()))
    if key not in ORACLES:
        flax_model = model(head, **changes)
        params, extra = variables(flax_model)

        def objective(params, books, sizes):
            result = oracle.run(
                flax_model.config,
                params,
                books,
                jnp.asarray(ids(2, LENGTH)),
                window=sizes["window"],
                mask=jnp.broadcast_to(jnp.arange(LENGTH) < sizes["length"], (2, LENGTH)),
                block=sizes["block"],
            )
            return weighted_sum(result.logits, sizes["length"]) + result.commitment, result

        ORACLES[key] = params, extra, jax.jit(jax.value_and_grad(objective, has_aux=True))
    params, extra, call = ORACLES[key]
    with jax.enable_x64(True):
        sizes = {"block": block, "window": window, "length": length}
        actual = call(oracle.float64(params), oracle.float64(extra["codebook"]), sizes)
        return params, extra, jax.tree.map(np.asarray, actual)


def weighted_sum(logits, length):
    """Returns the sum of the logits of the first `length` tokens with random weights."""
    factors = jnp.asarray(np.random.default_rng(5).normal(size=(2, LENGTH, 19)))
    mask = jnp.arange(LENGTH) < length
    full = jnp.zeros((2, LENGTH, 19), logits.dtype).at[:, : logits.shape[1]].set(logits)
    return jnp.where(mask[None, :, None], factors.astype(logits.dtype) * full, 0.0).sum()


def check(head, reduction, block, window, length, gradients=True, **changes):
    params, extra, ((_, expected), slopes) = oracle_values(head, block, window, length, **changes)
    flax_model = model(head, reduction=reduction, block_size=block, window_size=window, **changes)
    tokens = ids(2, LENGTH)[:, :length]

    def objective(params):
        output, updated = flax_model(tokens, params=params, extra=extra, train=True)
        scaled = output.auxiliary_loss / flax_model.config.commitment_cost
        return weighted_sum(output.logits, length) + scaled, (output, updated)

    call = jax.value_and_grad(objective, has_aux=True) if gradients else None
    if call is None:
        output, updated = jax.jit(lambda p: objective(p)[1])(params)
    else:
        (_, (output, updated)), actual_gradients = jax.jit(call)(params)
        assert_gradients_close(actual_gradients, slopes, 1e-5)
    scale = max(1.0, float(np.abs(expected.logits).max()))
    assert max_difference(output.logits, expected.logits[:, :length]) <= 1e-5 * scale
    for number, module in enumerate(expected.modules):
        assert np.array_equal(statistics(updated, "new_counts")[number], module.counts)
        assert max_difference(statistics(updated, "new_sums")[number], module.sums) <= 1e-5


@pytest.mark.parametrize("head, reduction", first(FEW, *list(FEW)[:4]), ids=str)
def test_linear_attention_is_the_quadratic_one(head, reduction):
    block, window, length = FEW[head, reduction]
    gradients = (head, reduction) in {
        ("shga", "recurrent"),
        ("mqa", "matmul"),
        ("gqa", "associative_scan"),
    }
    check(head, reduction, block, window, length, gradients)


@pytest.mark.parametrize("reduction", [pytest.param("recurrent", marks=pytest.mark.slow), "matmul"])
def test_sliding_window_without_a_cache(reduction):
    block, window, length = {"recurrent": (3, 2, 11), "matmul": (4, 5, 12)}[reduction]
    check("shga", reduction, block, window, length, False, use_compressive_cache=False)


@pytest.mark.parametrize("reduction", [pytest.param("recurrent", marks=pytest.mark.slow), "serial"])
def test_gradients_may_stop_at_the_block(reduction):
    check("mqa", reduction, 4, 3, 13, True, stop_gradient_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("window, block", [(4, 3), (0, 2)])
def test_quadratic_evaluation_has_the_gradients_of_the_blocks(window, block):
    params, extra, ((_, expected), slopes) = oracle_values("gqa", block, window, 13)
    flax_model = model("gqa", attention_type="vq_quadratic", block_size=block, window_size=window)

    def objective(params):
        output, _ = flax_model(ids(2, LENGTH), params=params, extra=extra, train=True)
        scaled = output.auxiliary_loss / flax_model.config.commitment_cost
        return weighted_sum(output.logits, LENGTH) + scaled, output

    (_, output), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    scale = max(1.0, float(np.abs(expected.logits).max()))
    assert max_difference(output.logits, expected.logits) <= 1e-5 * scale
    assert_gradients_close(gradients, slopes, 1e-5)


@pytest.mark.slow
def test_reductions_agree():
    flax_model = model("mqa", block_size=3, window_size=4)
    params, extra = variables(flax_model, 3)
    tokens = ids(2, 14, 1)

    def loss(params, reduction):
        flax_model.config.reduction = reduction
        output = flax_model(tokens, params=params, extra=extra)[0]
        return token_losses(output.logits, tokens[:, ::-1]).mean()

    call = jax.jit(lambda p: [jax.value_and_grad(loss)(p, name) for name in REDUCTIONS])
    # With weights and residuals in float64 only the reductions round.
    with jax.enable_x64(True):
        params, extra = oracle.float64(params), oracle.float64(extra)
        (first, gradients), *remaining = call(params)
    for value, slopes in remaining:
        assert max_difference(value, first) <= 1e-6
        assert_gradients_close(slopes, gradients, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("compressive", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("block, window", [*itertools.product((1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 6))])
def test_every_block_and_window(block, window, compressive):
    check("shga", "recurrent", block, window, 12, True, use_compressive_cache=compressive)


@pytest.mark.slow
@pytest.mark.parametrize("head, reduction", [*itertools.product(HEADS, REDUCTIONS)])
@pytest.mark.parametrize("block, window, length", [(4, 4, 12), (4, 4, 4), (4, 4, 8), (5, 3, 13)])
def test_every_head_and_reduction(head, reduction, block, window, length):
    check(head, reduction, block, window, length)


@pytest.mark.slow
def test_every_parameter_has_a_gradient():
    """Ensures that the other tests do not compare zeros."""
    for head, (block, window, length) in (("shga", (3, 4, 11)), ("gqa", (3, 3, 13))):
        *_, slopes = oracle_values(head, block, window, length)[2]
        for path, leaf in trees.flatten(slopes).items():
            assert np.abs(leaf).max() > 1e-4, trees.join(path)
