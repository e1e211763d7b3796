"""Random keys: by row, by layer, and never the same one twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn.random import batch_keys, element_bits, row_keys


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


def draws(keys):
    """Draw from all that hangs on the keys, and on those of a part of the model."""
    part = keys.child().fold_in(3)
    return [
        np.asarray(k.bits((2, 9))) for k in (keys, keys.per_sequence, part, part.per_sequence)
    ] + [
        np.asarray(k.bits((9,)))
        for k in (keys.shared, keys.per_sequence.shared, part.shared, part.per_sequence.shared)
    ]


def test_nothing_that_hangs_on_keys_draws_the_same():
    for keys in (batch_keys(jax.random.key(0), jnp.arange(2)), nn.make_keys(jax.random.key(0))):
        found = draws(keys)
        assert len({drawn.tobytes() for drawn in found}) == len(found)


def test_shared_keys_are_those_of_all_rows_however_they_are_cut():
    key = jax.random.key(0)
    whole, part = (batch_keys(key, jnp.array(rows)).fold_in(1) for rows in ([5, 1], [1, 0]))
    for a, b in zip(draws(whole)[4:], draws(part)[4:], strict=True):
        assert np.array_equal(a, b)


def test_steady_keys_are_those_of_the_first_window():
    first, other, rows = jax.random.key(0), jax.random.key(1), jnp.arange(2)
    begin, later = batch_keys(first, rows), batch_keys(other, rows, sequence_key=first)
    same = [np.array_equal(a, b) for a, b in zip(draws(begin), draws(later), strict=True)]
    assert same == [False, True, False, True, False, True, False, True]


@pytest.mark.slow
def test_steady_and_shared_keys_go_through_layers_scanned_or_not():
    from flax import nnx

    from hfseq.nn.stack import stack_layers

    class Layer(nnx.Module):
        def __call__(self, x, *, rngs):
            return x, (rngs.per_sequence.bits((2, 5)), rngs.shared.bits((5,)))

    class Holder(nnx.Module):
        def __init__(self):
            self.layer = nn.Layers([Layer(), Layer()])

    found = []
    for scanned in (False, True):
        holder = Holder()
        if scanned:
            stack_layers(holder)
        keys = batch_keys(jax.random.key(0), jnp.arange(2))
        found.append(nn.run_layers(holder.layer, jnp.ones(1), rngs=keys)[1])
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(found[0][0][0], found[0][1][0])


@pytest.mark.parametrize("rows", [0, 2, 6], ids=["one key", "rows share keys", "a key a row"])
def test_a_kernel_makes_the_bits_of_any_element_from_a_rows_seeds(rows):
    keys = nn.make_keys(
        row_keys(jax.random.key(0), jnp.arange(rows)) if rows else jax.random.key(0)
    )
    drawn = keys.draw((6, 2, 5, 7))
    first, second, offset = drawn.seeds().T[:, :, None]
    bits = element_bits(jnp.arange(2 * 5 * 7, dtype=jnp.uint32) + offset, first, second)
    np.testing.assert_array_equal(bits.reshape(drawn.shape), drawn.all())
