"""Random keys per row and per layer, none of which is used twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn.random import batch_keys, element_bits, row_keys
from tests.support.tiers import first


def test_every_use_draws_new_bits():
    keys = nn.make_keys(jax.random.key(0))
    first, second, third = keys.bits((64,)), keys.bits((64,)), keys.child().bits((64,))
    assert first.dtype == jnp.uint16
    for a, b in ((first, second), (first, third), (second, third)):
        assert not np.array_equal(a, b)


def test_children_are_reproducible_and_differ_from_their_parents_bits():
    first, second = (nn.make_keys(jax.random.key(0)) for _ in range(2))
    assert np.array_equal(first.child().bits((9,)), second.child().bits((9,)))
    assert not np.array_equal(first.child().bits((9,)), second.child().fold_in(1).bits((9,)))


def test_two_stacks_in_one_model_draw_different_masks():
    keys = nn.make_keys(jax.random.key(0))

    def layer(x, *, rngs):
        return x, rngs.bits((64,))

    from flax import nnx

    layers = nnx.List([layer])
    _, (encoder,), _ = nn.run_layers(layers, jnp.ones(1), rngs=keys)
    _, (decoder,), _ = nn.run_layers(layers, jnp.ones(1), rngs=keys)
    assert not np.array_equal(encoder, decoder)


def test_row_keys_make_masks_depend_on_rows_only():
    rows = jnp.array([3, 1, 7])
    draw = jax.jit(
        lambda rows: nn.make_keys(row_keys(jax.random.key(0), rows)).bits((len(rows), 20))
    )
    all_rows, part = draw(rows), draw(rows[1:])
    assert np.array_equal(all_rows[1:], part) and not np.array_equal(all_rows[0], all_rows[1])


def test_rows_may_contain_several_sequences():
    keys = nn.make_keys(row_keys(jax.random.key(0), jnp.arange(2)))
    bits = np.asarray(keys.bits((6, 20)))
    assert bits.shape == (6, 20) and len({row.tobytes() for row in bits}) == 6


def test_legacy_keys_and_none():
    old = nn.make_keys(jax.random.PRNGKey(4)).bits((9,))
    assert np.array_equal(nn.make_keys(jax.random.key(4)).bits((9,)), old)
    assert nn.make_keys(None) is None


def draws(keys):
    """Draws from all keys derived from `keys`, and from those of a part of the model."""
    part = keys.child().fold_in(3)
    return [
        np.asarray(k.bits((2, 9))) for k in (keys, keys.per_sequence, part, part.per_sequence)
    ] + [
        np.asarray(k.bits((9,)))
        for k in (keys.shared, keys.per_sequence.shared, part.shared, part.per_sequence.shared)
    ]


def test_all_derived_keys_draw_different_bits():
    for keys in (batch_keys(jax.random.key(0), jnp.arange(2)), nn.make_keys(jax.random.key(0))):
        results = draws(keys)
        assert len({bits.tobytes() for bits in results}) == len(results)


def test_shared_keys_do_not_depend_on_micro_batches():
    key = jax.random.key(0)
    full_batch, part = (batch_keys(key, jnp.array(rows)).fold_in(1) for rows in ([5, 1], [1, 0]))
    for a, b in zip(draws(full_batch)[4:], draws(part)[4:], strict=True):
        assert np.array_equal(a, b)


def test_per_sequence_keys_equal_those_of_the_first_window():
    first, other, rows = jax.random.key(0), jax.random.key(1), jnp.arange(2)
    begin, later = batch_keys(first, rows), batch_keys(other, rows, sequence_key=first)
    same = [np.array_equal(a, b) for a, b in zip(draws(begin), draws(later), strict=True)]
    assert same == [False, True, False, True, False, True, False, True]


@pytest.mark.slow
def test_per_sequence_and_shared_keys_pass_through_looped_and_scanned_layers():
    from flax import nnx

    from hfseq.nn.stack import stack_layers

    class Layer(nnx.Module):
        def __call__(self, x, *, rngs):
            return x, (rngs.per_sequence.bits((2, 5)), rngs.shared.bits((5,)))

    class Holder(nnx.Module):
        def __init__(self):
            self.layer = nn.Layers([Layer(), Layer()])

    results = []
    for scanned in (False, True):
        holder = Holder()
        if scanned:
            stack_layers(holder)
        keys = batch_keys(jax.random.key(0), jnp.arange(2))
        results.append(nn.run_layers(holder.layer, jnp.ones(1), rngs=keys)[1])
    for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(results[0][0][0], results[0][1][0])


@pytest.mark.parametrize("rows", first([0, 2, 6], 0, 2))
def test_seeds_reproduce_the_bits_of_any_element(rows):
    keys = nn.make_keys(
        row_keys(jax.random.key(0), jnp.arange(rows)) if rows else jax.random.key(0)
    )
    lazy_bits = keys.draw((6, 2, 5, 7))
    first, second, offset = lazy_bits.seeds().T[:, :, None]
    bits = jax.jit(element_bits)(jnp.arange(2 * 5 * 7, dtype=jnp.uint32) + offset, first, second)
    np.testing.assert_array_equal(bits.reshape(lazy_bits.shape), lazy_bits.all())
