"""Random keys: by row, by layer, and never the same one twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import nn
from hfseq.nn.random import row_keys


def test_every_use_draws_other_bits():
    keys = nn.make_keys(jax.random.key(0))
    first, second, third = keys.bits((64,)), keys.bits((64,)), keys.child().bits((64,))
    assert first.dtype == jnp.uint16
    for a, b in ((first, second), (first, third), (second, third)):
        assert not np.array_equal(a, b)


def test_children_are_reproducible_and_differ_from_their_parents_bits():
    one, two = (nn.make_keys(jax.random.key(0)) for _ in range(2))
    assert np.array_equal(one.child().bits((9,)), two.child().bits((9,)))
    assert not np.array_equal(one.child().bits((9,)), two.child().fold_in(1).bits((9,)))


def test_two_stacks_in_one_model_draw_different_masks():
    keys = nn.make_keys(jax.random.key(0))

    def layer(x, *, rngs):
        return x, rngs.bits((64,))

    from flax import nnx

    layers = nnx.List([layer])
    _, (encoder,), _ = nn.run_layers(layers, jnp.ones(1), rngs=keys)
    _, (decoder,), _ = nn.run_layers(layers, jnp.ones(1), rngs=keys)
    assert not np.array_equal(encoder, decoder)


def test_row_keys_make_masks_of_rows_alone():
    rows = jnp.array([3, 1, 7])
    whole = nn.make_keys(row_keys(jax.random.key(0), rows)).bits((3, 20))
    part = nn.make_keys(row_keys(jax.random.key(0), rows[1:])).bits((2, 20))
    assert np.array_equal(whole[1:], part) and not np.array_equal(whole[0], whole[1])


def test_rows_may_hold_several_sequences():
    keys = nn.make_keys(row_keys(jax.random.key(0), jnp.arange(2)))
    drawn = np.asarray(keys.bits((6, 20)))
    assert drawn.shape == (6, 20) and len({row.tobytes() for row in drawn}) == 6


def test_old_keys_and_none():
    old = nn.make_keys(jax.random.PRNGKey(4)).bits((9,))
    assert np.array_equal(nn.make_keys(jax.random.key(4)).bits((9,)), old)
    assert nn.make_keys(None) is None
