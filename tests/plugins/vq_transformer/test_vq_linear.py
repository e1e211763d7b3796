"""Attention in blocks against the quadratic oracle: every head, reduction, window and block."""

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
# Each time other blocks, windows and lengths: shorter or longer than each other, or with a rest.
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


def everything(head, block, window, length, **changes):
    """The oracle's loss, result and gradients for the first ``length`` tokens."""
    key = (head, *sorted(changes.items()))
    if key not in ORACLES:
        chosen = model(head, **changes)
        params, extra = variables(chosen)

        def objective(params, books, place):
            result = oracle.run(
                chosen.config,
                params,
                books,
                jnp.asarray(ids(2, LENGTH)),
                window=place["window"],
                mask=jnp.broadcast_to(jnp.arange(LENGTH) < place["length"], (2, LENGTH)),
                block=place["block"],
            )
            return weigh(result.logits, place["length"]) + result.commitment, result

        ORACLES[key] = params, extra, jax.jit(jax.value_and_grad(objective, has_aux=True))
    params, extra, call = ORACLES[key]
    with jax.enable_x64(True):
        place = {"block": block, "window": window, "length": length}
        found = call(oracle.float64(params), oracle.float64(extra["codebook"]), place)
        return params, extra, jax.tree.map(np.asarray, found)


def weigh(logits, length):
    """A scalar in which every logit of the first ``length`` tokens has a weight of its own."""
    factors = jnp.asarray(np.random.default_rng(5).normal(size=(2, LENGTH, 19)))
    kept = jnp.arange(LENGTH) < length
    full = jnp.zeros((2, LENGTH, 19), logits.dtype).at[:, : logits.shape[1]].set(logits)
    return jnp.where(kept[None, :, None], factors.astype(logits.dtype) * full, 0.0).sum()


def check(head, reduction, block, window, length, gradients=True, **changes):
    params, extra, ((_, wanted), slopes) = everything(head, block, window, length, **changes)
    chosen = model(head, reduction=reduction, block_size=block, window_size=window, **changes)
    tokens = ids(2, LENGTH)[:, :length]

    def objective(params):
        output, after = chosen(tokens, params=params, extra=extra, train=True)
        scaled = output.auxiliary_loss / chosen.config.commitment_cost
        return weigh(output.logits, length) + scaled, (output, after)

    call = jax.value_and_grad(objective, has_aux=True) if gradients else None
    if call is None:
        output, after = jax.jit(lambda p: objective(p)[1])(params)
    else:
        (_, (output, after)), found = jax.jit(call)(params)
        assert_gradients_close(found, slopes, 1e-5)
    scale = max(1.0, float(np.abs(wanted.logits).max()))
    assert max_difference(output.logits, wanted.logits[:, :length]) <= 1e-5 * scale
    for number, seen in enumerate(wanted.modules):
        assert np.array_equal(statistics(after, "new_counts")[number], seen.counts)
        assert max_difference(statistics(after, "new_sums")[number], seen.sums) <= 1e-5


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
    params, extra, ((_, wanted), slopes) = everything("gqa", block, window, 13)
    chosen = model("gqa", attention_type="vq_quadratic", block_size=block, window_size=window)

    def objective(params):
        output, _ = chosen(ids(2, LENGTH), params=params, extra=extra, train=True)
        scaled = output.auxiliary_loss / chosen.config.commitment_cost
        return weigh(output.logits, LENGTH) + scaled, output

    (_, output), found = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    scale = max(1.0, float(np.abs(wanted.logits).max()))
    assert max_difference(output.logits, wanted.logits) <= 1e-5 * scale
    assert_gradients_close(found, slopes, 1e-5)


@pytest.mark.slow
def test_reductions_agree():
    chosen = model("mqa", block_size=3, window_size=4)
    params, extra = variables(chosen, 3)
    tokens = ids(2, 14, 1)

    def loss(params, reduction):
        chosen.config.reduction = reduction
        output = chosen(tokens, params=params, extra=extra)[0]
        return token_losses(output.logits, tokens[:, ::-1]).mean()

    call = jax.jit(lambda p: [jax.value_and_grad(loss)(p, name) for name in REDUCTIONS])
    # Weights and residuals in float64: what is left is what the reductions themselves round.
    with jax.enable_x64(True):
        params, extra = oracle.float64(params), oracle.float64(extra)
        (first, gradients), *others = call(params)
    for value, slopes in others:
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
    """Otherwise the comparisons above would compare zeros."""
    for head, (block, window, length) in (("shga", (3, 4, 11)), ("gqa", (3, 3, 13))):
        *_, slopes = everything(head, block, window, length)[2]
        for path, leaf in trees.flatten(slopes).items():
            assert np.abs(leaf).max() > 1e-4, trees.join(path)
