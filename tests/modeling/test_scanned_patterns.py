"""A model with different layers, scanned in patterns: files, results, cache and layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn import trees
from hfseq.nn.sharding import Layout, make_mesh
from tests.support.windowed import FlaxWindowedLM, WindowedConfig

IDS = np.random.default_rng(0).integers(1, 16, (2, 9))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed")
    loop = FlaxWindowedLM(WindowedConfig(), seed=1, gradient_checkpointing=True)
    loop.save_pretrained(folder / "loop")
    scanned = FlaxWindowedLM.from_pretrained(
        folder / "loop", scan_layers=True, gradient_checkpointing=True
    )
    scanned.save_pretrained(folder / "scanned")
    return loop, scanned, FlaxWindowedLM.from_pretrained(folder / "scanned")


def test_files_of_scanned_patterns_are_those_of_the_loop(models):
    loop, scanned, again = models
    shapes = {path: leaf.shape for path, leaf in trees.flatten(scanned.params).items()}
    # The first layer, then two pairs of a windowed layer and a full one.
    leading = {
        path[1]: shape[0] for path, shape in shapes.items() if path[2:] == ("query", "kernel")
    }
    assert leading == {"0": 1, "1": 2, "2": 2}
    assert ("layers", "0", "norm", "scale") not in shapes
    for path, leaf in trees.flatten(loop.params).items():
        assert np.array_equal(trees.flatten(again.params)[path], leaf), path


@pytest.mark.slow
def test_a_training_step_of_scanned_patterns_is_that_of_the_loop(models):
    def step(model):
        def loss(params):
            logits = model(IDS, params=params, train=True, dropout_rng=jax.random.key(0)).logits
            return jnp.square(logits).sum(), logits

        return jax.jit(jax.grad(loss, has_aux=True))(model.params)

    loop, scanned, _ = models
    (expected, logits), (ours, scanned_logits) = step(loop), step(scanned)
    assert np.array_equal(scanned_logits, logits)
    ours = scanned.weight_map.unstack(trees.flatten(ours))
    for path, gradient in trees.flatten(expected).items():
        np.testing.assert_allclose(ours[path], gradient, atol=1e-5, rtol=1e-4)


def test_scanned_patterns_decode_with_a_cache(models):
    loop, scanned, _ = models

    @jax.jit
    def decode(params):
        cache, parts = scanned.init_cache(len(IDS), 9), []
        for part in (slice(0, 5), slice(5, 9)):
            positions = jnp.broadcast_to(jnp.arange(9)[part], IDS[:, part].shape)
            output = scanned(
                IDS[:, part], position_ids=positions, past_key_values=cache, params=params
            )
            cache, parts = output.past_key_values, [*parts, output.logits]
        return jnp.concatenate(parts, 1)

    full = jax.jit(lambda params: loop(IDS, params=params).logits)(loop.params)
    np.testing.assert_allclose(decode(scanned.params), full, atol=1e-5)


def test_the_axis_of_layers_of_a_pattern_is_never_split(models):
    scanned = models[1]
    shapes = {path: leaf.shape for path, leaf in trees.flatten(scanned.params).items()}
    layout = Layout(make_mesh("fsdp=2,data=4"), None, stacked=scanned.stacked_prefixes)
    specs = layout.specs(shapes)
    assert tuple(specs["layers", "2", "query", "kernel"]) == (None, None, "fsdp")
    assert tuple(specs["embed", "embedding"]) == (None, "fsdp")
