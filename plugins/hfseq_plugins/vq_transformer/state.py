"""The state of an attention layer: a window of keys, and a cache of older tokens by code.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

# Number of axes of each array of a state.
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
        window_key: Keys of the window, float32 `(B, Hk, M, K)`.
        window_value: Values of the window, `(B, Hk, M, V)`.
        window_code: Codes of the window, `(B, Hk, M)`.
        cache_mean: See :class:`Cache`, float32 `(B, Hk, S, V)`.
        cache_count: See :class:`Cache`, int32 `(B, Hk, S)`.
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
        """The older tokens, which are grouped by code."""
        return Cache(self.cache_mean, self.cache_count)


def empty_state(batch: int, config: VQTransformerConfig, dtype: DTypeLike) -> State:
    """Returns the state before the first token.

    Args:
        batch: The batch size.
        config: The configuration.
        dtype: The dtype of the values.
    """
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
    """Empties the state of some rows.

    Args:
        state: The state.
        rows: True for the rows to empty, `(B,)`.
        codes: The number of codes S, which marks an empty slot.
    """

    def clear(leaf: jax.Array, name: str) -> jax.Array:
        row_mask = rows.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(row_mask, codes if name == "window_code" else 0, leaf).astype(leaf.dtype)

    return State(*(clear(leaf, name) for name, leaf in state._asdict().items()))


def window_in_order(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the keys, values and codes of the window, with the oldest token first."""
    window = state.window_code.shape[-1]
    slots = (state.position[:, None] + jnp.arange(window)) % max(window, 1)
    return (
        take(state.window_key, slots),
        take(state.window_value, slots),
        take(state.window_code, slots),
    )


def ring_order(position: jax.Array, window: int) -> jax.Array:
    """Returns the token in each slot of the window, `(B, M)`, as an index into the last M tokens.

    Index 0 is the oldest token.

    Args:
        position: The number of tokens so far, `(B,)`.
        window: The window size M.
    """
    return (jnp.arange(window) - position[:, None]) % max(window, 1)


def take(leaf: jax.Array, indices: jax.Array) -> jax.Array:
    """Selects the tokens `indices`, `(B, n)`, of an array `(B, H, T)` or `(B, H, T, F)`."""
    index = indices[:, None] if leaf.ndim == 3 else indices[:, None, :, None]
    return jnp.take_along_axis(leaf, index, axis=2, mode="clip")


def merge(cache: Cache, new: Cache) -> Cache:
    """Merges two caches. The operation is associative. The empty cache is its neutral element."""
    count = cache.count + new.count
    divisor = jnp.maximum(count, 1)
    old_share, new_share = cache.count / divisor, new.count / divisor
    return Cache(old_share[..., None] * cache.mean + new_share[..., None] * new.mean, count)


def summarize_by_code(value: jax.Array, code: jax.Array, codes: int) -> Cache:
    """Builds a cache from values.

    Args:
        value: Values, `(..., T, V)`.
        code: Their codes, `(..., T)`. Values whose code is at least `codes` are ignored.
        codes: The number of codes S.
    """
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
