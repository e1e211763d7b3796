"""The cache of keys and values: chunks of any length, what a query may see."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn
from hfseq.nn import kv_cache


class Attention(nn.CachedAttention):
    def __init__(self, causal=True):
        super().__init__()
        self.kv_heads, self.head_dim, self.causal = 2, 4, causal


def chunk(length, start=0):
    values = jnp.arange(start, start + length, dtype=jnp.float32) + 1
    return jnp.broadcast_to(values[None, :, None, None], (3, length, 2, 4))


def test_without_a_cache_everything_comes_back_to_be_masked_causally():
    key, value, mask, causal = nn.extend_cache(Attention(), chunk(5), chunk(5), None)
    assert key.shape == value.shape == (3, 5, 2, 4) and mask is None and causal


def test_chunks_are_appended_and_the_future_is_hidden():
    module = Attention()
    kv_cache.add_cache(module, 3, 6, jnp.float32)
    key, value, mask, causal = nn.extend_cache(module, chunk(3), -chunk(3), None)
    assert not causal and key.shape == (3, 6, 2, 4)
    assert np.array_equal(mask[0, 0], np.tril(np.ones((3, 6), bool)))
    key, value, mask, _ = nn.extend_cache(module, chunk(2, 3), -chunk(2, 3), None)
    assert key[0, :, 0, 0].tolist() == [1, 2, 3, 4, 5, 0]
    assert value[0, :, 0, 0].tolist() == [-1, -2, -3, -4, -5, 0]
    assert np.array_equal(mask[0, 0], np.tril(np.ones((6, 6), bool))[3:5])
    assert int(module.cache_index[...]) == 5


def test_a_mask_of_the_caller_is_kept():
    module = Attention()
    kv_cache.add_cache(module, 3, 4, jnp.float32)
    given = nn.attention_mask(jnp.array([[0, 1, 1, 1]] * 3))
    _, _, mask, _ = nn.extend_cache(module, chunk(2), chunk(2), given)
    assert np.array_equal(mask[0, 0], [[False] * 4, [False, True, False, False]])


def test_only_causal_attentions_get_a_cache():
    parent = nnx.List([Attention(), Attention(causal=False)])
    kv_cache.add_cache(parent, 1, 4, jnp.bfloat16)
    assert parent[0].cached_key[...].dtype == jnp.bfloat16
    assert parent[1].cached_key is None
