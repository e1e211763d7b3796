"""Optimizers with `--scan_layers`: stacked layers are updated like separate layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfseq import plugins
from hfseq.nn import trees
from hfseq.training.arguments import TrainingArguments
from hfseq.training.optimizers import make_optimizer, make_schedule
from tests.support.tiers import first

LAYERS = 3
SHAPES = {
    ("attention", "q_proj", "kernel"): (128, 130),  # large enough to be factored
    ("attention", "content_bias"): (6,),
    ("attention", "input_norm", "scale"): (5,),
}


def arrays(seed):
    """A tree of layers with values of very different magnitude per layer, and an embedding."""
    draw = np.random.default_rng(seed)
    flat = {("model", "embed_tokens", "embedding"): draw.normal(size=(7, 5))}
    for layer in range(LAYERS):
        for path, shape in SHAPES.items():
            flat["model", "layers", str(layer), *path] = draw.normal(size=shape) * 10.0**-layer
    return trees.unflatten({path: jnp.asarray(leaf, jnp.float32) for path, leaf in flat.items()})


def stack(tree):
    layers = tree["model"]["layers"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers.values())
    return {"model": {**tree["model"], "layers": stacked}}


def train(tree_of, stacked, **changes):
    """The parameters after three updates. `tree_of` arranges the trees."""
    options = dataclasses.replace(TrainingArguments(output_dir="x", learning_rate=0.02), **changes)
    factory = plugins.load().optimizers.get(options.optim)
    optimizer = make_optimizer(factory, options, make_schedule(options, 10), stacked)
    params = tree_of(arrays(0))
    state = optimizer.init(params)
    for step in range(3):
        updates, state = optimizer.update(tree_of(arrays(step + 1)), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("mode", ["decoupled", "absolute"])
@pytest.mark.parametrize(
    "optim",
    first(["adamw", "muon", "lion", "adafactor", "lamb", "lars", "novograd"], "adamw", "muon"),
)
def test_a_scanned_stack_is_updated_as_its_layers_one_by_one(optim, mode):
    options = {"optim": optim, "weight_decay": 0.01, "weight_decay_mode": mode}
    one_by_one = stack(train(lambda tree: tree, (), **options))
    scanned = train(stack, (("model", "layers"),), **options)
    for path, leaf in trees.flatten(one_by_one).items():
        np.testing.assert_allclose(
            trees.flatten(scanned)[path], leaf, rtol=1e-5, atol=1e-7, err_msg=trees.join(path)
        )


@pytest.mark.slow
def test_a_stack_that_only_some_layers_have_is_updated_too():
    params = {"block": {"bias_table": jnp.ones((1, 4, 2)), "kernel": jnp.ones((3, 4, 2))}}
    options = TrainingArguments(output_dir="x", optim="adafactor", learning_rate=0.1)
    factory = plugins.load().optimizers.get("adafactor")
    optimizer = make_optimizer(factory, options, make_schedule(options, 10), (("block",),))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert all((leaf < 0).all() for leaf in jax.tree.leaves(updates))
