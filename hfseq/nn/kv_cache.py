"""The key-value cache of autoregressive decoding, for all families.

A cache consists of three variables of each attention module, with the names of Transformers 4
(`cached_key`, `cached_value`, `cache_index`). Outside of the module it is the nested dict that
`init_cache` returns and `past_key_values` carries. Cross-attention caches the keys and values of
the encoder's output. These never change, so it has no index.

A `StateAttention` has a cache of a fixed size instead, which does not depend on the length. One of
its entries is `position`, `(batch,)`, which distinguishes its caches from others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from hfseq.errors import UsageError
from hfseq.nn.context import ConstructorSignature, current_options
from hfseq.nn.visible import Mask, as_visibility


class CachedAttention(nnx.Module):
    """Base class of attention modules with a key-value cache.

    Attributes:
        kv_heads: Number of key and value heads. Set by subclasses.
        head_dim: Features per head. Set by subclasses.
        causal: Whether this is causal self-attention, which caches the keys and values of past
            tokens.
        cross: Whether this is cross-attention, which caches those of the encoder's output. It must
            not be causal.
    """

    __signature__ = ConstructorSignature()
    kv_heads: int
    head_dim: int
    causal: bool = True
    cross: bool = False

    def __init__(self) -> None:
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)
        self.cache_index: Any = nnx.data(None)


class StateAttention(nnx.Module):
    """Base class of attention modules whose cache has a fixed size.

    Attributes:
        entries: Names of the cache entries. Each has the batch on its first axis. One of them must
            be `position`, int32 `(batch,)`, the number of processed tokens. Without a cache the
            attributes of these names are `None`.
    """

    __signature__ = ConstructorSignature()
    entries: ClassVar[tuple[str, ...]] = ("position",)

    def __init__(self) -> None:
        for name in self.entries:
            setattr(self, name, nnx.data(None))

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Returns the entries before the first token. `dtype` is that of computation."""
        raise NotImplementedError

    def read_cache(self) -> dict[str, jax.Array] | None:
        """Returns the entries, or `None` without a cache."""
        variables = {name: getattr(self, name) for name in self.entries}
        return (
            {n: v[...] for n, v in variables.items()} if variables["position"] is not None else None
        )

    def write_cache(self, entries: Mapping[str, jax.Array]) -> None:
        """Stores new entries in the dtypes of the old ones. Without a cache they are ignored."""
        for name, value in entries.items():
            variable = getattr(self, name)
            if variable is not None:
                variable.set_value(value.astype(variable[...].dtype))


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """The size of an empty cache.

    Attributes:
        batch_size: Number of rows.
        max_length: Number of tokens per row.
        encoder: Rows and tokens of the encoder's output, if it is cached.
    """

    batch_size: int
    max_length: int
    encoder: tuple[int, int] | None = None


def add_cache(module: nnx.Module, size: CacheSize, dtype: DTypeLike) -> None:
    """Adds an empty cache to causal attention, and to cross-attention if `size.encoder` is set."""
    for _, part in nnx.iter_graph(module):
        if isinstance(part, StateAttention):
            for name, leaf in part.empty_cache(size.batch_size, dtype).items():
                setattr(part, name, nnx.Cache(leaf))
        if not isinstance(part, CachedAttention):
            continue
        lead = (size.batch_size, size.max_length) if part.causal else size.encoder
        if lead is None or not (part.causal or part.cross):
            continue
        shape = (*lead, part.kv_heads, part.head_dim)
        part.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        part.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        if part.causal:
            part.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))


def is_causal(config: Any) -> bool:
    """Returns whether causal attention is causal, which `is_causal=False` in config.json changes.

    Transformers then makes all masks of self-attention bidirectional, as embedding models that were
    made from decoders need.
    """
    return bool(getattr(config, "is_causal", True))


def apply_is_causal(module: nnx.Module, config: Any) -> None:
    """Makes the self-attention of a module bidirectional if its configuration says so."""
    if is_causal(config):
        return
    for _, part in nnx.iter_graph(module):
        if isinstance(part, CachedAttention):
            part.causal = False


def empty_cache(module: nnx.Module, shapes: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Returns the empty cache of a module.

    Args:
        module: The model. Its variables may be abstract and stacked.
        shapes: The cache with `jax.ShapeDtypeStruct` leaves.
        batch_size: Number of rows.
    """
    states = {
        tuple(map(str, path)): part
        for path, part in nnx.iter_graph(module)
        if isinstance(part, StateAttention)
    }

    def make(cache: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        entries = {}
        if path in states:
            entries = states[path].empty_cache(batch_size, jnp.float32)
        return {
            name: make(leaf, (*path, name))
            if isinstance(leaf, Mapping)
            else jnp.broadcast_to(entries.get(name, 0), leaf.shape).astype(leaf.dtype)
            for name, leaf in cache.items()
        }

    return make(shapes, ())


def extend_cache(
    module: CachedAttention,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
) -> tuple[jax.Array, jax.Array, Mask, bool]:
    """Appends keys and values to the cache and returns what the queries attend to.

    Without a cache the inputs are returned with `causal=True`, or `causal=False` if the module is
    not causal. With one, the keys and values of the
    whole buffer are returned. The mask then hides positions that are not filled yet, and those
    outside of a window in `mask`.

    Args:
        module: The attention module.
        key: New keys, `(batch, length, kv_heads, head_dim)`.
        value: New values, same shape as `key`.
        mask: Which keys are visible.

    Returns:
        Keys, values, the mask, and the `causal` argument for `hfseq.nn.attend`.
    """
    if module.cached_key is None:
        return key, value, mask, module.causal
    index, new = module.cache_index[...], key.shape[1]
    full_key = _write(module.cached_key[...], key, index)
    full_value = _write(module.cached_value[...], value, index)
    module.cached_key[...], module.cached_value[...] = full_key, full_value
    module.cache_index[...] = index + new
    visible, keys, dtype = as_visibility(mask, causal=True), full_key.shape[1], key.dtype
    band, other_mask = visible.band(new, keys, index), visible.without_band(keys)
    assert band is not None
    cache_mask = band[None, None] if other_mask is None else other_mask & band
    return full_key.astype(dtype), full_value.astype(dtype), cache_mask, False


def encoder_cache(
    module: CachedAttention, make: Callable[[], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values of the encoder's output, from the cache if it contains them.

    While the cache is filled (`init_cache(..., params=)`) they are computed and stored.

    Args:
        module: The attention module.
        make: Computes the keys and values.
    """
    if module.cached_key is not None and not current_options().fill_encoder_cache:
        return module.cached_key[...], module.cached_value[...]
    key, value = make()
    if module.cached_key is not None:
        dtype = module.cached_key[...].dtype
        module.cached_key[...], module.cached_value[...] = key.astype(dtype), value.astype(dtype)
    return key, value


def _is_state(cache: Mapping[str, Any]) -> bool:
    return "position" in cache


def _grows(cache: Mapping[str, Any]) -> bool:
    return "cache_index" in cache


def _map_entries(cache: Mapping[str, Any], change: Callable[[dict[str, Any]], Any]) -> Any:
    """Applies `change` to the cache entries of self-attention, at any depth."""
    if _grows(cache) or _is_state(cache):
        return change(dict(cache))
    return {
        name: _map_entries(part, change) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def _take(entry: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Selects rows of a cache entry, whose layers may be stacked."""
    if _is_state(entry):
        axis, names = entry["position"].ndim - 1, tuple(entry)
    else:  # (batch, length, heads, head_dim), after a layer axis where layers are scanned
        axis, names = entry["cached_key"].ndim - 4, ("cached_key", "cached_value")
    # Rows are in bounds. The default mode would check every element again.
    selected = {name: jnp.take(entry[name], rows, axis=axis, mode="clip") for name in names}
    return {**entry, **selected}


def reorder(cache: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Selects rows of the decoder's cache, as in beam search, and keeps the encoder's cache."""
    return _map_entries(cache, lambda entry: _take(entry, rows))


def select_rows(
    cache: Mapping[str, Any], rows: jax.Array, encoder_rows: jax.Array
) -> dict[str, Any]:
    """Selects rows of the whole cache.

    Args:
        cache: The cache.
        rows: Rows of the decoder's entries.
        encoder_rows: Rows of the encoder's entries.
    """
    if _grows(cache) or _is_state(cache):
        return _take(cache, rows)
    if "cached_key" in cache:
        return _take(cache, encoder_rows)
    return {
        name: select_rows(part, rows, encoder_rows) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def rewind(cache: Mapping[str, Any], index: int | jax.Array) -> dict[str, Any]:
    """Sets the position of the next token. Later positions are overwritten.

    A `StateAttention` cannot be rewound: its prompt must hide the tokens that do not belong to it.

    Args:
        cache: The cache.
        index: The position of the next token.
    """

    def move(entry: dict[str, Any]) -> dict[str, Any]:
        if _is_state(entry):
            return entry
        return {**entry, "cache_index": jnp.full_like(entry["cache_index"], index)}

    return _map_entries(cache, move)


def restart(cache: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the cache of self-attention by an empty one. The encoder's cache does not change.

    Args:
        cache: The cache.
        fresh: An empty cache.
    """
    if _grows(cache) or _is_state(cache):
        return dict(fresh)
    return {
        name: restart(part, fresh[name]) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def check_capacity(cache: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Checks that a cache has the rows of the inputs and room for their tokens.

    Under `jit` the number of filled positions is unknown. Tokens beyond the capacity then overwrite
    the last positions.

    Raises:
        UsageError: The number of rows differs, or the cache is too small.
    """
    ids = next((v for n, v in inputs.items() if n.endswith("input_ids")), None)
    if ids is None:
        return
    fills: list[tuple[int, int]] = []  # filled positions, and capacity
    cache_rows, rows = set(), len(ids)

    def add_rows(entry: dict[str, Any]) -> None:
        if _is_state(entry):
            cache_rows.add(entry["position"].shape[-1])
            return
        cache_rows.add(entry["cached_key"].shape[-4])
        num_filled, capacity = entry["cache_index"], entry["cached_key"].shape[-3]
        if not fills and not isinstance(num_filled, jax.core.Tracer):
            fills.append((int(np.max(num_filled)), capacity))

    _map_entries(cache, add_rows)
    if cache_rows - {rows}:
        raise UsageError(
            f"past_key_values was made for {min(cache_rows - {rows})} rows, but the tokens have "
            f"{rows}. Pass the cache of the same batch, or init_cache({rows}, ...) for a new one"
        )
    num_filled, capacity = fills[0] if fills else (0, ids.shape[-1])
    if num_filled + ids.shape[-1] > capacity:
        raise UsageError(
            f"past_key_values has a capacity of {capacity} tokens: {num_filled} are filled and "
            f"{ids.shape[-1]} are new. Make a longer cache with init_cache({rows}, ...)"
        )


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, index, zero, zero))
