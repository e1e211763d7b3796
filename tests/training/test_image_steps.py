"""Image models on a mesh take the same steps as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfseq import plugins
from hfseq.nn import trees
from hfseq.nn.sharding import BATCH_AXES, make_mesh
from hfseq.training import setup
from tests.support import models, parallel

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
PAIRED = ("clip", "vision_text_dual_encoder")
REGISTERED = {"vision_text_dual_encoder": "vision-text-dual-encoder"}
WAYS = ({}, {"scan_layers": True, "gradient_checkpointing": True})


def loss(model, params, batch, key):
    """The contrastive loss of CLIP, or the loss of a classifier."""
    options = {"params": params, "dropout_rng": key, "train": True}
    if "labels" in batch:
        logits = model(batch["pixel_values"], **options).logits
        return cross_entropy(logits, batch["labels"]).mean()
    logits = model(batch["input_ids"], batch["pixel_values"], **options).logits_per_text
    pairs = jnp.arange(len(logits))
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)).mean() / 2


def losses(name, mesh, **options):
    """Runs four steps of Adam, and returns their losses."""
    config = getattr(models, f"{name}_config")(num_hidden_layers=3)
    if name in PAIRED:  # CLIP's own scale: with a smaller one four steps learn little
        config.logit_scale_init_value = 2.6592
    head = parallel.main_head(REGISTERED.get(name, name))
    model_class = plugins.load().architectures.get(REGISTERED.get(name, name)).load_head(head)
    model = model_class(config, _do_init=False, **options)
    params, optimizer = model.init_weights(jax.random.key(0)), optax.adam(1e-2)
    other = (
        {"labels": np.arange(8) % 3} if name not in PAIRED else {"input_ids": models.ids(8) % 24}
    )
    batch = {"pixel_values": models.images(8), **other}
    if mesh:
        grid = make_mesh(mesh, jax.devices()[:4])
        layout = setup.shard_model(model, grid)
        flat = trees.flatten(params)
        shardings = layout.shardings({path: leaf.shape for path, leaf in flat.items()})
        params = trees.unflatten(
            {p: jax.device_put(leaf, shardings[p]) for p, leaf in flat.items()}
        )
        batch = jax.device_put(batch, jax.NamedSharding(grid, jax.P(BATCH_AXES)))
        assert any(not leaf_sharding.is_fully_replicated for leaf_sharding in shardings.values())

    @jax.jit
    def step(params, state, batch, key):
        value, gradient = jax.value_and_grad(lambda p: loss(model, p, batch, key))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = jax.jit(optimizer.init)(params), []
    for number in range(4):
        params, state, value = step(params, state, batch, jax.random.key(number))
        values.append(float(value))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("name", ["beit", "dinov2", "vit", *PAIRED])
def test_steps_on_a_mesh_are_those_of_one_device(name, options):
    alone = losses(name, None)
    together = losses(name, "data=2,tensor=2", **options)
    assert alone[-1] < 0.9 * alone[0]
    assert np.allclose(alone, together, rtol=1e-4)
