"""Query, key and value as one product: the same numbers, the same tree, one operation."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn, plugins
from hfseq.nn import trees
from hfseq.nn.context import Options, options
from hfseq.nn.fp8 import for_gradient
from hfseq.nn.precision import Precision, apply_precision
from hfseq.nn.precision import low_precision_dot_general as product
from tests.support import models as tiny

# Products in FP8: those of a layer, with query, key and value (or key and value) as one.
TARGETED = {
    ("bert", "ForMaskedLM"): 2 * 4,
    ("roberta", "ForMaskedLM"): 2 * 4,
    ("gpt2", "ForCausalLM"): 2 * 4,
    ("t5", "ForSeq2SeqLM"): 2 * 4 + 2 * 7,
    ("bart", "ForSeq2SeqLM"): 2 * 4 + 2 * 7,
    ("wmt_transformer", "ForSeq2SeqLM"): 2 * 4 + 2 * 7,
    ("fp8_encoder", "ForMaskedLM"): 2 * 4,
}


class Attention(nnx.Module):
    def __init__(self, rngs, widths=(8, 8, 8), kind=nn.Linear):
        for name, width in zip(("query", "key", "value"), widths, strict=True):
            setattr(self, name, kind(6, width, nn.normal(0.1), rngs))

    def __call__(self, x, source=None):
        source = x if source is None else source
        return self.query(x), self.key(source), self.value(source)


class Block(nnx.Module):
    def __init__(self, name="attention", **options):
        setattr(self, name, Attention(nnx.Rngs(0), **options))
        self.part = name

    def __call__(self, *inputs):
        return getattr(self, self.part)(*inputs)


def counted():
    calls = []

    def run(x, w, dimensions):
        calls.append(w.shape)
        return product(x, w, dimensions)

    return calls, Precision("counted", jnp.float32, lambda: run, fused=True)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1D])
def test_three_projections_are_one_product(kind):
    plain, module = Block(kind=kind), Block(kind=kind)
    calls, recipe = counted()
    apply_precision(module, recipe)
    x = array(2, 3, 6)
    for ours, theirs in zip(module(x), plain(x), strict=True):
        assert tiny.close(ours, theirs, 1e-6)
    assert calls == [(6, 3, 8) if kind is nn.Linear else (3, 8, 6)]


def test_the_tree_of_parameters_is_the_same():
    plain, module = Block(), Block()
    apply_precision(module, counted()[1])
    paths = [list(trees.flatten(trees.to_dict(trees.split(m)[1]))) for m in (plain, module)]
    assert paths[0] == paths[1]


def test_in_cross_attention_keys_and_values_are_one_product():
    module, (calls, recipe) = Block("crossattention"), counted()
    apply_precision(module, recipe)
    module(array(2, 3, 6), array(2, 5, 6, seed=1))
    assert sorted(calls) == [(6, 2, 8), (6, 8)]


def test_another_input_than_expected_is_computed_alone():
    """A model whose cross-attention has no telling name is right, if not fast."""
    plain, module, (calls, recipe) = Block(), Block(), counted()
    apply_precision(module, recipe)
    x, source = array(2, 3, 6), array(2, 5, 6, seed=1)
    for _ in range(2):
        with options(Options()):
            given = module(x, source)
        for ours, theirs in zip(given, plain(x, source), strict=True):
            assert tiny.close(ours, theirs, 1e-6)
    assert len(calls) == 6


def test_a_pass_that_failed_leaves_nothing_behind():
    module, (calls, recipe) = Block(), counted()
    apply_precision(module, recipe)
    with options(Options()):
        module.attention.query(array(2, 3, 6))
    with options(Options()):
        module(array(2, 3, 6, seed=1))
    assert calls == [(6, 3, 8)] * 2


def test_fewer_heads_of_keys_and_values_are_fused_without_the_query():
    module, (calls, recipe) = Block(widths=(8, 4, 4)), counted()
    apply_precision(module, recipe)
    module(array(2, 3, 6))
    assert sorted(calls) == [(6, 2, 4), (6, 8)]


def test_sites_that_leave_one_out_leave_all_alone():
    module, (_, recipe) = Block(), counted()
    apply_precision(module, Precision("some", jnp.float32, recipe.make_dot_general, ("key",), True))
    assert module.attention.query.fused is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize(("model_type", "head"), TARGETED)
def test_on_a_gpu_every_targeted_product_is_three_of_fp8(model_type, head, recipe):
    """The program for CUDA has FP8 operands in every targeted product, forward and backward."""
    config = getattr(tiny, f"{model_type}_config")()
    spec = plugins.load().architectures.get(model_type)
    model = spec.load_head(head)(config, precision=recipe)
    inputs = {"input_ids": tiny.ids()}
    if head == "ForSeq2SeqLM":
        inputs["decoder_input_ids"] = tiny.ids(seed=1)

    def loss(params, extra):
        extra = {name: for_gradient(tree) for name, tree in extra.items()}
        output, _ = model.run(inputs, params, jax.random.key(0), True, extra=extra)
        return (output.logits.astype(jnp.float32) ** 2).mean()

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(model.params, model.extra)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    operands = re.findall(r"stablehlo\.dot_general .*?: \((tensor<[^)]*)\)", text)
    low = [types for types in operands if "f8E" in types]
    assert all(types.count("f8E") == 2 for types in low)
    assert len(low) == 3 * TARGETED[model_type, head]
    backward = [types for types in low if "f8E5M2" in types]
    assert len(backward) == 2 * TARGETED[model_type, head]
