"""Fast reductions equal the standard ones."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from hfseq.nn.cpu import fast_argmax


def test_first_of_equal_maxima():
    x = jnp.array([[1.0, 3.0, 3.0, 2.0], [-jnp.inf, -jnp.inf, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    assert fast_argmax(x).tolist() == [1, 2, 0]


def test_equals_argmax_for_any_shape():
    x = np.random.default_rng(0).normal(size=(3, 5, 70)).astype(np.float32)
    assert np.array_equal(fast_argmax(jnp.asarray(x)), x.argmax(-1))
    assert np.array_equal(fast_argmax(jnp.asarray(x), jnp.asarray(x.max(-1))), x.argmax(-1))


def test_a_row_with_nan_gives_a_valid_index():
    assert int(fast_argmax(jnp.array([0.0, jnp.nan, 1.0]))) == 2
