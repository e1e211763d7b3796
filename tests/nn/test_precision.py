"""Precision recipes: dtypes, sites, and half-precision products with float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.precision import (
    BFLOAT16,
    FLOAT32,
    Precision,
    apply_precision,
    choose_precision,
    precision_for,
)
from hfseq.nn.precision import low_precision_dot_general as product
from tests.support.models import close


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class TwoLinears(nnx.Module):
    def __init__(self, rngs):
        init = nn.normal(0.1)
        self.first, self.second = nn.Linear(8, 8, init, rngs), nn.Linear(8, 4, init, rngs)
        self.norm = nn.LayerNorm(8, 1e-5)

    def __call__(self, x):
        return self.second(self.norm(self.first(x)))


@pytest.mark.parametrize("axis", [0, 1])
def test_product_and_gradients_are_close_to_float32(axis):
    x, w, g = random(3, 5, 16), random(16, 6, seed=1), random(3, 5, 6, seed=2)
    w = w if axis == 0 else w.T
    dimensions = (((2,), (axis,)), ((), ()))

    def loss(run, x, w):
        return (run(x, w, dimensions).astype(jnp.float32) * g).sum()

    exact = jax.grad(lambda *a: loss(jax.lax.dot_general, *a), (0, 1))(x, w)
    dx, dw = jax.grad(lambda *a: loss(product, *a), (0, 1))(x.astype(jnp.bfloat16), w)
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    assert close(dx, exact[0], 0.02) and close(dw, exact[1], 0.02)
    actual = product(x.astype(jnp.bfloat16), w, dimensions)
    assert actual.dtype == jnp.bfloat16
    assert close(actual, jax.lax.dot_general(x, w, dimensions), 0.02)


def test_backward_products_use_half_types():
    x, w = random(4, 16).astype(jnp.bfloat16), random(16, 6)
    dimensions = (((1,), (0,)), ((), ()))
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: product(x, w, dimensions).sum()))(w)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    types = {str(v.aval.dtype) for e in products for v in e.invars}
    assert products and types == {"bfloat16"}


def test_sites_choose_the_linears():
    operations = []

    def own(*arguments):
        return product(*arguments)

    def make():
        operations.append(own)
        return own

    module = TwoLinears(nnx.Rngs(0))
    apply_precision(module, Precision("mixed", jnp.bfloat16, make, sites=(r"^second$",)))
    assert len(operations) == 1
    assert module.second.dot_general is own
    assert module.first.dot_general is product
    assert module.norm.compute_dtype == jnp.bfloat16
    assert module(random(2, 8)).dtype == jnp.bfloat16


def test_operations_with_state_are_one_for_each_linear():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, lhs, rhs, dimensions, **_):
            self.calls[...] = self.calls[...] + 1
            return jax.lax.dot_general(lhs, rhs, dimensions)

    module = TwoLinears(nnx.Rngs(0))
    apply_precision(module, Precision("counting", jnp.float32, Counting))
    module(random(2, 8))
    module(random(2, 8))
    assert module.first.dot_general is not module.second.dot_general
    assert float(module.first.dot_general.calls[...]) == 2


@pytest.mark.parametrize(
    ("dtype", "recipe"), [("float32", FLOAT32), (jnp.bfloat16, BFLOAT16), (None, FLOAT32)]
)
def test_dtypes_select_their_recipe(dtype, recipe):
    assert precision_for(dtype) is recipe


def test_sites_that_match_no_linear_raise_an_error_with_the_linears():
    recipe = Precision("mixed", jnp.bfloat16, lambda: product, sites=("attention",))
    with pytest.raises(UsageError, match="no Linear matches attention.* first, sec"):
        apply_precision(TwoLinears(nnx.Rngs(0)), recipe)


def test_a_recipe_takes_another_type_and_other_sites():
    recipe = choose_precision("fp8_current", "float32", ("mlp",))
    assert (recipe.compute_dtype, recipe.sites) == (jnp.float32, ("mlp",))
    assert choose_precision("fp8_current").compute_dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["bfloat16", "fp8_current"])
def test_unknown_recipe_options_are_an_error(name):
    with pytest.raises(UsageError, match=f"'{name}' .* options margin"):
        choose_precision(name, margin=1)


def test_an_unknown_recipe_is_named_with_the_nearest():
    with pytest.raises(UsageError, match=r"fp8_delaid.*fp8_delayed"):
        choose_precision("fp8_delaid")


def test_invalid_site_expressions_are_an_error():
    with pytest.raises(UsageError, match=r"'\(' is not a valid regular expression"):
        choose_precision("float32", sites=("(",))
