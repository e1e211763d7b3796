"""The key-value cache: chunks of any length, and which keys a query sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.nn import kv_cache
from hfseq.nn.context import Options


class Attention(nn.CachedAttention):
    def __init__(self, causal=True, cross=False):
        super().__init__()
        self.kv_heads, self.head_dim, self.causal, self.cross = 2, 4, causal, cross


def give_cache(module, rows, length, encoder=None, dtype=jnp.float32):
    kv_cache.add_cache(module, kv_cache.CacheSize(rows, length, encoder), dtype)


def chunk(length, start=0):
    values = jnp.arange(start, start + length, dtype=jnp.float32) + 1
    return jnp.broadcast_to(values[None, :, None, None], (3, length, 2, 4))


def test_without_a_cache_inputs_are_returned_for_causal_attention():
    key, value, mask, causal = nn.extend_cache(Attention(), chunk(5), chunk(5), None)
    assert key.shape == value.shape == (3, 5, 2, 4) and mask is None and causal


def test_chunks_are_appended_and_the_future_is_hidden():
    module = Attention()
    give_cache(module, 3, 6)
    key, value, mask, causal = nn.extend_cache(module, chunk(3), -chunk(3), None)
    assert not causal and key.shape == (3, 6, 2, 4)
    assert np.array_equal(mask[0, 0], np.tril(np.ones((3, 6), bool)))
    key, value, mask, _ = nn.extend_cache(module, chunk(2, 3), -chunk(2, 3), None)
    assert key[0, :, 0, 0].tolist() == [1, 2, 3, 4, 5, 0]
    assert value[0, :, 0, 0].tolist() == [-1, -2, -3, -4, -5, 0]
    assert np.array_equal(mask[0, 0], np.tril(np.ones((6, 6), bool))[3:5])
    assert int(module.cache_index[...]) == 5


def test_explicit_mask_applies_with_cache():
    module = Attention()
    give_cache(module, 3, 4)
    attention_mask = nn.attention_mask(jnp.array([[0, 1, 1, 1]] * 3))
    _, _, mask, _ = nn.extend_cache(module, chunk(2), chunk(2), attention_mask)
    assert np.array_equal(mask[0, 0], [[False] * 4, [False, True, False, False]])


def test_only_causal_attentions_get_a_cache():
    parent = nnx.List([Attention(), Attention(causal=False)])
    give_cache(parent, 1, 4, dtype=jnp.bfloat16)
    assert parent[0].cached_key[...].dtype == jnp.bfloat16
    assert parent[1].cached_key is None


def test_cross_attention_gets_a_cache_only_for_an_encoder_of_known_size():
    parent = nnx.List([Attention(), Attention(causal=False, cross=True)])
    give_cache(parent, 6, 4)
    assert parent[1].cached_key is None
    give_cache(parent, 6, 4, encoder=(2, 5))
    assert parent[0].cached_key[...].shape == (6, 4, 2, 4)
    assert parent[1].cached_value[...].shape == (2, 5, 2, 4)
    assert parent[1].cache_index is None


def never():
    raise AssertionError("made again")


def test_encoder_keys_are_computed_without_a_cache_and_read_with_one():
    module = Attention(causal=False, cross=True)
    key_value = (chunk(5), -chunk(5))
    assert nn.encoder_cache(module, lambda: key_value)[0] is key_value[0]
    give_cache(module, 3, 4, encoder=(3, 5))
    with nn.options(Options(fill_encoder_cache=True)):
        key, value = nn.encoder_cache(module, lambda: key_value)
    assert key is key_value[0] and value is key_value[1]
    key, value = nn.encoder_cache(module, never)
    assert np.array_equal(key, key_value[0]) and np.array_equal(value, key_value[1])


def test_encoder_keys_are_stored_in_the_dtype_of_the_cache():
    module = Attention(causal=False, cross=True)
    give_cache(module, 3, 4, encoder=(3, 5), dtype=jnp.bfloat16)
    with nn.options(Options(fill_encoder_cache=True)):
        nn.encoder_cache(module, lambda: (chunk(5), chunk(5)))
    assert nn.encoder_cache(module, never)[0].dtype == jnp.bfloat16


def entry(rows, layers=(), index=True):
    numbers = jnp.arange(rows, dtype=jnp.float32)[:, None, None, None]
    keys = jnp.broadcast_to(numbers, (*layers, rows, 5, 2, 4))
    arrays = {"cached_key": keys, "cached_value": -keys}
    return arrays | ({"cache_index": jnp.full(layers, 3, jnp.int32)} if index else {})


@pytest.mark.parametrize("layers", [(), (2,)], ids=["loop", "scan"])
def test_reordering_selects_rows_and_keeps_the_encoder_cache(layers):
    cache = {"layer": {"own": entry(4, layers), "other": entry(2, layers, index=False)}}
    picked = kv_cache.reorder(cache, jnp.array([2, 2, 0, 1]))["layer"]
    assert picked["own"]["cached_key"][..., 0, 0, 0].reshape(-1, 4)[-1].tolist() == [2, 2, 0, 1]
    assert picked["own"]["cached_value"].shape == cache["layer"]["own"]["cached_value"].shape
    assert np.array_equal(picked["own"]["cache_index"], cache["layer"]["own"]["cache_index"])
    assert picked["other"] == cache["layer"]["other"]


@pytest.mark.parametrize("layers", [(), (2,)], ids=["loop", "scan"])
def test_rewinding_sets_every_index_and_restarting_empties(layers):
    cache = {"layer": {"own": entry(4, layers), "other": entry(2, layers, index=False)}}
    back = kv_cache.rewind(cache, 1)["layer"]
    assert (back["own"]["cache_index"] == 1).all() and back["own"]["cache_index"].shape == layers
    assert back["own"]["cached_key"] is cache["layer"]["own"]["cached_key"]
    fresh = jax.tree.map(jnp.zeros_like, cache)
    empty = kv_cache.restart(cache, fresh)["layer"]
    assert empty["own"] == fresh["layer"]["own"]
    assert empty["other"] == back["other"] == cache["layer"]["other"]


@pytest.mark.slow
def test_a_rewound_cache_is_overwritten_from_its_index():
    module = Attention()
    give_cache(module, 3, 4)
    nn.extend_cache(module, chunk(3), chunk(3), None)
    module.cache_index[...] = jnp.int32(1)
    key, _, mask, _ = nn.extend_cache(module, chunk(1, 8), chunk(1, 8), None)
    assert key[0, :, 0, 0].tolist() == [1, 9, 3, 0]
    assert mask[0, 0].tolist() == [[True, True, False, False]]
