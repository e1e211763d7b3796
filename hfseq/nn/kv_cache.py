"""The key-value cache of autoregressive decoding, one for every family.

A cache lives on the attention module as three variables with v4's names (``cached_key``,
``cached_value``, ``cache_index``); outside the module it is the nested dict that ``init_cache``
returns and ``past_key_values`` carries. Attention to an encoder keeps the keys and values of the
encoder's output, which never change and so have no index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfseq.nn.stack import current_options


class CachedAttention(nnx.Module):
    """Base of attentions with a cache; subclasses set ``kv_heads`` and ``head_dim``.

    ``causal`` attention to itself caches what it has seen; ``cross`` attention, which must not be
    causal, the keys and values of an encoder's output.
    """

    kv_heads: int
    head_dim: int
    causal: bool = True
    cross: bool = False

    def __init__(self) -> None:
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)
        self.cache_index: Any = nnx.data(None)


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """How much an empty cache holds; ``encoder`` is (rows, tokens) of the encoder, if cached."""

    batch_size: int
    max_length: int
    encoder: tuple[int, int] | None = None


def add_cache(module: nnx.Module, size: CacheSize, dtype: Any) -> None:
    """Give every causal :class:`CachedAttention`, and cross-attention if wanted, an empty cache."""
    for _, part in nnx.iter_graph(module):
        if not isinstance(part, CachedAttention):
            continue
        places = (size.batch_size, size.max_length) if part.causal else size.encoder
        if places is None or not (part.causal or part.cross):
            continue
        shape = (*places, part.kv_heads, part.head_dim)
        part.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        part.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        if part.causal:
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


def encoder_cache(
    module: CachedAttention, make: Callable[[], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of the encoder's output: from the cache if it has them, else made.

    Where the cache is being filled (``init_cache(..., params=)``) they are made and kept.
    """
    if module.cached_key is not None and not current_options().fill_encoder_cache:
        return module.cached_key[...], module.cached_value[...]
    key, value = make()
    if module.cached_key is not None:
        kept = module.cached_key[...].dtype
        module.cached_key[...], module.cached_value[...] = key.astype(kept), value.astype(kept)
    return key, value


def _grown(cache: Mapping[str, Any]) -> bool:
    return "cache_index" in cache


def _map_entries(cache: Mapping[str, Any], change: Callable[[dict[str, Any]], Any]) -> Any:
    """Apply ``change`` to the entries of attention to itself, whatever their depth."""
    if _grown(cache):
        return change(dict(cache))
    return {
        name: _map_entries(part, change) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def reorder(cache: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Pick rows of the cache, as beam search does; what belongs to the encoder stays as it is."""

    def pick(entry: dict[str, Any]) -> dict[str, Any]:
        kept = {
            # (batch, length, heads, head_dim), after a layer axis where layers are scanned
            # (clip: rows are in bounds, and the default looks again at every element)
            name: jnp.take(entry[name], rows, axis=entry[name].ndim - 4, mode="clip")
            for name in ("cached_key", "cached_value")
        }
        return {**entry, **kept}

    return _map_entries(cache, pick)


def select(cache: Mapping[str, Any], rows: jax.Array, encoder_rows: jax.Array) -> dict[str, Any]:
    """Keep some rows: ``rows`` of the decoder's entries, ``encoder_rows`` of the encoder's."""
    if "cached_key" not in cache:
        return {
            name: select(part, rows, encoder_rows) if isinstance(part, Mapping) else part
            for name, part in cache.items()
        }
    kept = rows if _grown(cache) else encoder_rows
    taken = {
        name: jnp.take(cache[name], kept, axis=cache[name].ndim - 4, mode="clip")
        for name in ("cached_key", "cached_value")
    }
    return {**cache, **taken}


def rewind(cache: Mapping[str, Any], index: Any) -> dict[str, Any]:
    """Let the next token be written at ``index``; what lies there and after it is overwritten."""

    def move(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "cache_index": jnp.full_like(entry["cache_index"], index)}

    return _map_entries(cache, move)


def restart(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Empty the entries of attention to itself; what belongs to the encoder stays as it is."""
    return _map_entries(cache, lambda entry: jax.tree.map(jnp.zeros_like, entry))


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, index, zero, zero))


def _both(mask: jax.Array | None, visible: jax.Array) -> jax.Array:
    return visible if mask is None else mask & visible
