"""What a layer remembers of a text, in a fixed space: a window of keys and a cache by code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

STATE_RANKS = {
    "window_key": 4,
    "window_value": 4,
    "window_code": 3,
    "cache_mean": 4,
    "cache_count": 3,
    "position": 1,
}


class Cache(NamedTuple):
    """Keys that left the window, by code.

    ``mean`` (B, Hk, S, V) of their values, float32, and ``count`` (B, Hk, S), int32: it is exact as
    far as anybody decodes.
    """

    mean: jax.Array
    count: jax.Array


class State(NamedTuple):
    """The state of one attention after ``position`` (B,) tokens.

    ``window_key`` (B, Hk, M, K) float32, ``window_value`` (B, Hk, M, V) and ``window_code``
    (B, Hk, M) are a ring: token i lies in slot i modulo M. The code S marks an empty slot.
    """

    window_key: jax.Array
    window_value: jax.Array
    window_code: jax.Array
    cache_mean: jax.Array
    cache_count: jax.Array
    position: jax.Array

    @property
    def cache(self) -> Cache:
        """The compressive cache."""
        return Cache(self.cache_mean, self.cache_count)


def empty_state(batch: int, config: VQTransformerConfig, dtype: DTypeLike) -> State:
    """Return the state before the first token; ``dtype`` is that of the values."""
    heads, window, codes = config.key_heads, config.window_size, config.num_codes
    return State(
        window_key=jnp.zeros((batch, heads, window, config.head_dim)),
        window_value=jnp.zeros((batch, heads, window, config.value_width), dtype),
        window_code=jnp.full((batch, heads, window), codes, jnp.int32),
        cache_mean=jnp.zeros((batch, heads, codes, config.value_width)),
        cache_count=jnp.zeros((batch, heads, codes), jnp.int32),
        position=jnp.zeros(batch, jnp.int32),
    )


def reset(state: State, rows: jax.Array, codes: int) -> State:
    """Empty the state of the ``rows`` (B,) that are True; ``codes`` marks an empty slot."""

    def clear(leaf: jax.Array, name: str) -> jax.Array:
        chosen = rows.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(chosen, codes if name == "window_code" else 0, leaf).astype(leaf.dtype)

    return State(*(clear(leaf, name) for name, leaf in state._asdict().items()))


def window_in_order(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys, values and codes of the window, the oldest token first."""
    window = state.window_code.shape[-1]
    slots = (state.position[:, None] + jnp.arange(window)) % max(window, 1)
    return (
        take(state.window_key, slots),
        take(state.window_value, slots),
        take(state.window_code, slots),
    )


def ring_order(position: jax.Array, window: int) -> jax.Array:
    """Return (B, M): which of the last M tokens, the oldest being 0, lies in each slot."""
    return (jnp.arange(window) - position[:, None]) % max(window, 1)


def take(leaf: jax.Array, places: jax.Array) -> jax.Array:
    """Pick ``places`` (B, n) along the third axis of (B, H, T) or (B, H, T, F)."""
    index = places[:, None] if leaf.ndim == 3 else places[:, None, :, None]
    return jnp.take_along_axis(leaf, index, axis=2, mode="clip")


def merge(cache: Cache, new: Cache) -> Cache:
    """Put two caches together; associative, with the empty cache as its neutral element."""
    count = cache.count + new.count
    below = jnp.maximum(count, 1)
    old, young = cache.count / below, new.count / below
    return Cache(old[..., None] * cache.mean + young[..., None] * new.mean, count)


def summarize_by_code(value: jax.Array, code: jax.Array, codes: int) -> Cache:
    """Gather values (..., T, V) by their codes (..., T); codes of ``codes`` and up are left out."""
    lead, width = code.shape[:-1], value.shape[-1]
    groups = code.size // max(code.shape[-1], 1)
    flat = jnp.minimum(code, codes).reshape(groups, -1)
    places = (flat + (codes + 1) * jnp.arange(groups)[:, None]).reshape(-1)
    size = groups * (codes + 1)
    sums = jnp.zeros((size, width)).at[places].add(value.reshape(-1, width).astype(jnp.float32))
    count = jnp.zeros(size, jnp.int32).at[places].add(1)
    sums = sums.reshape(*lead, codes + 1, width)[..., :codes, :]
    count = count.reshape(*lead, codes + 1)[..., :codes]
    return Cache(sums / jnp.maximum(count, 1)[..., None], count)
