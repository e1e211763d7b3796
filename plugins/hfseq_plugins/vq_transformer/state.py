"""The state of an attention layer: a window of keys and a cache by code, of fixed size.

Dimensions in shapes are those of :mod:`hfseq_plugins.vq_transformer.blocks`.
"""

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
    """The tokens that left the window, grouped by code.

    Attributes:
        mean: The mean value of each code, float32 `(B, Hk, S, V)`.
        count: The number of tokens of each code, int32 `(B, Hk, S)`.
    """

    mean: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


class State(NamedTuple):
    """The state of one attention layer.

    The window is a ring buffer: token i is in slot i modulo M. The code S marks an empty slot.

    Attributes:
        window_key: Float32 `(B, Hk, M, K)`.
        window_value: `(B, Hk, M, V)`.
        window_code: `(B, Hk, M)`.
        cache_mean: Float32 `(B, Hk, S, V)`, see :class:`Cache`.
        cache_count: Int32 `(B, Hk, S)`.
        position: The number of tokens so far, `(B,)`.
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
    """Returns the state before the first token. `dtype` is the type of the values."""
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
    """Empties the state of the rows, `(B,)`, that are True. `codes` marks an empty slot."""

    def clear(leaf: jax.Array, name: str) -> jax.Array:
        row_mask = rows.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(row_mask, codes if name == "window_code" else 0, leaf).astype(leaf.dtype)

    return State(*(clear(leaf, name) for name, leaf in state._asdict().items()))


def window_in_order(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys, values and codes of the window, oldest token first."""
    window = state.window_code.shape[-1]
    slots = (state.position[:, None] + jnp.arange(window)) % max(window, 1)
    return (
        take(state.window_key, slots),
        take(state.window_value, slots),
        take(state.window_code, slots),
    )


def ring_order(position: jax.Array, window: int) -> jax.Array:
    """Returns which of the last M tokens, counted from the oldest, is in each slot, `(B, M)`."""
    return (jnp.arange(window) - position[:, None]) % max(window, 1)


def take(leaf: jax.Array, indices: jax.Array) -> jax.Array:
    """Takes `indices`, `(B, n)`, along the third axis of `(B, H, T)` or `(B, H, T, F)`."""
    index = indices[:, None] if leaf.ndim == 3 else indices[:, None, :, None]
    return jnp.take_along_axis(leaf, index, axis=2, mode="clip")


def merge(cache: Cache, new: Cache) -> Cache:
    """Merges two caches. Associative, with the empty cache as the neutral element."""
    count = cache.count + new.count
    divisor = jnp.maximum(count, 1)
    old_share, new_share = cache.count / divisor, new.count / divisor
    return Cache(old_share[..., None] * cache.mean + new_share[..., None] * new.mean, count)


def summarize_by_code(value: jax.Array, code: jax.Array, codes: int) -> Cache:
    """Builds a cache from values `(..., T, V)` and their codes.

    Positions whose code is `codes` or larger are ignored."""
    lead, width = code.shape[:-1], value.shape[-1]
    groups = code.size // max(code.shape[-1], 1)
    flat = jnp.minimum(code, codes).reshape(groups, -1)
    indices = (flat + (codes + 1) * jnp.arange(groups)[:, None]).reshape(-1)
    size = groups * (codes + 1)
    sums = jnp.zeros((size, width)).at[indices].add(value.reshape(-1, width).astype(jnp.float32))
    count = jnp.zeros(size, jnp.int32).at[indices].add(1)
    sums = sums.reshape(*lead, codes + 1, width)[..., :codes, :]
    count = count.reshape(*lead, codes + 1)[..., :codes]
    return Cache(sums / jnp.maximum(count, 1)[..., None], count)
