"""Query, key and value as one product: same results, same parameter tree, one operation."""

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

# FP8 products per layer, with query, key and value (or key and value) fused.
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
    def __init__(self, rngs, widths=(8, 8, 8), linear_class=nn.Linear):
        for name, width in zip(("query", "key", "value"), widths, strict=True):
            setattr(self, name, linear_class(6, width, nn.normal(0.1), rngs))

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


@pytest.mark.parametrize("linear_class", [nn.Linear, nn.Conv1D])
def test_three_projections_are_one_product(linear_class):
    plain, module = Block(linear_class=linear_class), Block(linear_class=linear_class)
    calls, recipe = counted()
    apply_precision(module, recipe)
    x = array(2, 3, 6)
    for ours, theirs in zip(module(x), plain(x), strict=True):
        assert tiny.close(ours, theirs, 1e-6)
    assert calls == [(6, 3, 8) if linear_class is nn.Linear else (3, 8, 6)]


def test_fusion_does_not_change_the_parameter_tree():
    plain, module = Block(), Block()
    apply_precision(module, counted()[1])
    paths = [list(trees.flatten(trees.to_dict(trees.split(m)[1]))) for m in (plain, module)]
    assert paths[0] == paths[1]


def test_cross_attention_fuses_key_and_value():
    module, (calls, recipe) = Block("crossattention"), counted()
    apply_precision(module, recipe)
    module(array(2, 3, 6), array(2, 5, 6, seed=1))
    assert sorted(calls) == [(6, 2, 8), (6, 8)]


def test_a_projection_of_another_input_is_computed_separately():
    """A cross-attention with an unusual name is correct, although slower."""
    plain, module, (calls, recipe) = Block(), Block(), counted()
    apply_precision(module, recipe)
    x, source = array(2, 3, 6), array(2, 5, 6, seed=1)
    for _ in range(2):
        with options(Options()):
            result = module(x, source)
        for ours, theirs in zip(result, plain(x, source), strict=True):
            assert tiny.close(ours, theirs, 1e-6)
    assert len(calls) == 6


def test_results_of_a_failed_forward_pass_are_dropped():
    module, (calls, recipe) = Block(), counted()
    apply_precision(module, recipe)
    with options(Options()):
        module.attention.query(array(2, 3, 6))
    with options(Options()):
        module(array(2, 3, 6, seed=1))
    assert calls == [(6, 3, 8)] * 2


def test_grouped_queries_fuse_key_and_value_only():
    module, (calls, recipe) = Block(widths=(8, 4, 4)), counted()
    apply_precision(module, recipe)
    module(array(2, 3, 6))
    assert sorted(calls) == [(6, 2, 4), (6, 8)]


def test_sites_must_match_all_projections_of_a_group():
    module, (_, recipe) = Block(), counted()
    apply_precision(module, Precision("some", jnp.float32, recipe.make_dot_general, ("key",), True))
    assert module.attention.query.fused_projection is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize(("model_type", "head"), TARGETED)
def test_on_a_gpu_each_targeted_product_has_three_fp8_products(model_type, head, recipe):
    """The CUDA program has FP8 operands in every targeted product, forward and backward."""
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
