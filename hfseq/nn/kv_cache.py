"""The key-value cache of autoregressive decoding, one for every family.

A cache lives on the attention module as three variables with v4's names (``cached_key``,
``cached_value``, ``cache_index``); outside the module it is the nested dict that ``init_cache``
returns and ``past_key_values`` carries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


class CachedAttention(nnx.Module):
    """Base of attentions with a cache; subclasses set ``kv_heads`` and ``head_dim``."""

    kv_heads: int
    head_dim: int
    causal: bool = True

    def __init__(self) -> None:
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)
        self.cache_index: Any = nnx.data(None)


def add_cache(module: nnx.Module, batch_size: int, max_length: int, dtype: Any) -> None:
    """Give every causal :class:`CachedAttention` in ``module`` an empty cache."""
    for _, part in nnx.iter_graph(module):
        if isinstance(part, CachedAttention) and part.causal:
            shape = (batch_size, max_length, part.kv_heads, part.head_dim)
            part.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
            part.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
            part.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))


def extend_cache(
    module: CachedAttention,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, bool]:
    """Append ``key`` and ``value`` to the cache and return what the queries attend to.

    Without a cache the inputs come back with ``causal=True``: the fused attention masks the future.
    With one, keys and values of the whole buffer come back with a mask that hides positions not yet
    written.
    """
    if module.cached_key is None:
        return key, value, mask, True
    index, new = module.cache_index[...], key.shape[1]
    full_key = _write(module.cached_key[...], key, index)
    full_value = _write(module.cached_value[...], value, index)
    module.cached_key[...], module.cached_value[...] = full_key, full_value
    module.cache_index[...] = index + new
    query_positions = index + jnp.arange(new)
    visible = (jnp.arange(full_key.shape[1])[None, :] <= query_positions[:, None])[None, None]
    dtype = key.dtype
    return full_key.astype(dtype), full_value.astype(dtype), _both(mask, visible), False


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, index, zero, zero))


def _both(mask: jax.Array | None, visible: jax.Array) -> jax.Array:
    return visible if mask is None else mask & visible
