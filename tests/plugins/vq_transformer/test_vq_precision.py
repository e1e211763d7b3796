"""Half precision: float32 arrays, and products in full precision."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from hfseq_plugins.vq_transformer.blocks import AttentionInputs, AttentionOptions, ScoreTerms
from hfseq_plugins.vq_transformer.codebook import quantize
from hfseq_plugins.vq_transformer.layers import attend, attend_one_token
from hfseq_plugins.vq_transformer.state import empty_state
from tests.support.tiers import first

TOKENS = 600
#: The weight of the last token, with score 60.06. All others have score 60.
SHARE = math.exp(0.06) / (TOKENS - 1 + math.exp(0.06))


def case(window, reduction):
    """Returns keys whose scores differ by less than bfloat16 resolves, and values that show it."""
    key = jnp.ones((1, 1, TOKENS, 1)).at[:, :, -1].set(1.001)
    value = jnp.zeros((1, 1, TOKENS, 1), jnp.bfloat16).at[:, :, -1].set(1)
    inputs = AttentionInputs(
        jnp.full((1, 1, 1, TOKENS, 2), 60.0).at[..., 1].set(0),
        jnp.concatenate([key, jnp.zeros_like(key)], -1),
        value,
        jnp.zeros((1, 1, TOKENS), jnp.int32),
    )
    offset = jnp.zeros((1, 1, 1, 2))
    terms = ScoreTerms(jnp.array([[[1.0, 0.0]]]), jnp.zeros((window + 1, 1, 2)), offset, offset)
    return inputs, terms, AttentionOptions(window, 128, reduction)


WAYS = [(600, "recurrent"), (0, "serial"), (7, "matmul")]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "reduction"), WAYS)
def test_scores_and_sums_are_float32_in_bfloat16(window, reduction):
    out, _ = attend(*case(window, reduction), None, None)
    assert out.dtype == jnp.float32
    assert float(out[0, 0, 0, -1, 0]) == pytest.approx(SHARE, rel=0.01)


@pytest.mark.parametrize(("window", "reduction"), first(WAYS, WAYS[0]))
def test_scores_and_sums_of_a_single_token_are_float32_in_bfloat16(window, reduction):
    inputs, terms, how = case(window, reduction)
    sizes = {"key_heads": 1, "window_size": window, "num_codes": 1, "head_dim": 2}
    state = empty_state(1, SimpleNamespace(**sizes, value_width=1), jnp.bfloat16)
    axes = {"query": 3, "key": 2, "value": 2, "code": 2}

    def part(begin, end):
        cut = {
            name: jax.lax.slice_in_dim(getattr(inputs, name), begin, end, axis=axis)
            for name, axis in axes.items()
        }
        return inputs._replace(**cut)

    prompt = jax.jit(lambda inputs, state: attend(inputs, terms, how, state, None)[1])
    state = prompt(part(0, TOKENS - 1), state)
    # The relative positions of a single token consist of two factors.
    terms = terms._replace(relative=(jnp.zeros((window + 1, 4)), jnp.zeros((4, 1, 2))))
    out, _ = attend_one_token(part(TOKENS - 1, TOKENS), terms, how, state)
    assert out.dtype == jnp.float32
    assert float(out[0, 0, 0, 0, 0]) == pytest.approx(SHARE, rel=0.01)


def products(jaxpr):
    """Yields the precision of all products, including those in inner programs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from products(value.jaxpr)


@pytest.mark.slow
def test_distances_to_codes_are_never_rounded():
    keys, rows = jnp.ones((1, 3, 2, 4)), jnp.ones((2, 5, 4))
    with jax.default_matmul_precision("bfloat16"):
        actual = [*products(jax.make_jaxpr(quantize)(keys, rows).jaxpr)]
    assert actual
    highest = jax.lax.Precision.HIGHEST
    assert all(precision == (highest, highest) for precision in actual)
