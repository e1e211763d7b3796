"""The key-value cache of autoregressive decoding, for all families.

The cache of an attention module consists of three variables with the names of Transformers 4:
`cached_key`, `cached_value`, and `cache_index`, the number of cached tokens. Outside of the module,
the cache is the nested dict that `init_cache` returns and that is passed as `past_key_values`.
Cross-attention caches the keys and values of the encoder's output. These do not change during
decoding, so there is no `cache_index`.

The cache of a `StateAttention` has a fixed size instead, which does not depend on the number of
tokens. Its entry `position`, `(batch,)`, distinguishes it from a key-value cache.
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
        cross: Whether this is cross-attention, which caches the keys and values of the encoder's
            output. `causal` must then be False.
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
        entries: Names of the cache entries, which are attributes of the module. The first axis of
            each entry is the batch. One entry must be `position`, int32 `(batch,)`, the number of
            processed tokens. Without a cache, the attributes are `None`.
    """

    __signature__ = ConstructorSignature()
    entries: ClassVar[tuple[str, ...]] = ("position",)

    def __init__(self) -> None:
        for name in self.entries:
            setattr(self, name, nnx.data(None))

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Returns the cache entries before the first token. `dtype` is the computation dtype."""
        raise NotImplementedError

    def read_cache(self) -> dict[str, jax.Array] | None:
        """Returns the cache entries, or `None` without a cache."""
        variables = {name: getattr(self, name) for name in self.entries}
        return (
            {n: v[...] for n, v in variables.items()} if variables["position"] is not None else None
        )

    def write_cache(self, entries: Mapping[str, jax.Array]) -> None:
        """Stores new cache entries, cast to the dtypes of the old ones.

        Without a cache, this method does nothing.
        """
        for name, value in entries.items():
            variable = getattr(self, name)
            if variable is not None:
                variable.set_value(value.astype(variable[...].dtype))


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """The size of an empty cache.

    Attributes:
        batch_size: Batch size.
        max_length: Maximum number of tokens per sequence.
        encoder: Batch size and number of positions of the encoder's output, or `None` if
            cross-attention is not cached.
    """

    batch_size: int
    max_length: int
    encoder: tuple[int, int] | None = None


def add_cache(module: nnx.Module, size: CacheSize, dtype: DTypeLike) -> None:
    """Adds empty caches to the attention modules of a model.

    Causal self-attention and `StateAttention` always get a cache. Cross-attention gets one if
    `size.encoder` is set.
    """
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
    """Returns whether the self-attention of a decoder is causal.

    By default it is causal. With `is_causal=False` in config.json it is bidirectional, as in
    Transformers. Embedding models that are based on decoders use this option.
    """
    return bool(getattr(config, "is_causal", True))


def apply_is_causal(module: nnx.Module, config: Any) -> None:
    """Makes the self-attention of a module bidirectional if `config.is_causal` is False."""
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
        batch_size: Batch size.
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
    """Appends keys and values to the cache and returns the arguments of `hfseq.nn.attend`.

    If the module has no cache, keys, values and mask are returned unchanged, together with the
    attribute `causal` of the module. If there is a cache, the result contains all keys and values
    of the cache, and `causal` is False. The returned mask then hides positions that are not filled
    yet, later positions, and positions outside of the window of `mask`.

    Args:
        module: The attention module.
        key: New keys, `(batch, length, kv_heads, head_dim)`.
        value: New values, same shape as `key`.
        mask: Which keys are visible. If there is a cache, the last axis of a mask array covers all
            positions of the cache.

    Returns:
        The arguments `key`, `value`, `mask` and `causal` of `hfseq.nn.attend`.
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
    """Returns the keys and values of the encoder's output for cross-attention.

    They are read from the cache of the module, or computed if it has no cache. While
    `init_cache(..., params=)` fills the cache, they are computed and stored.

    Args:
        module: The attention module.
        make: A function that computes the keys and values.
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
    """Selects entries of the batch in the cache of one attention module.

    If layers are stacked, the arrays have a leading layer axis.
    """
    if _is_state(entry):
        axis, names = entry["position"].ndim - 1, tuple(entry)
    else:  # (batch, length, heads, head_dim), after a layer axis where layers are scanned
        axis, names = entry["cached_key"].ndim - 4, ("cached_key", "cached_value")
    # The indices are in bounds. The default mode would check this for every element.
    selected = {name: jnp.take(entry[name], rows, axis=axis, mode="clip") for name in names}
    return {**entry, **selected}


def reorder(cache: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Selects batch entries of the self-attention cache, as beam search needs.

    The cache of cross-attention does not change.

    Args:
        cache: The cache.
        rows: Indices of the batch entries.
    """
    return _map_entries(cache, lambda entry: _take(entry, rows))


def select_rows(
    cache: Mapping[str, Any], rows: jax.Array, encoder_rows: jax.Array
) -> dict[str, Any]:
    """Selects batch entries of the whole cache.

    Args:
        cache: The cache.
        rows: Indices of batch entries in the cache of self-attention.
        encoder_rows: Indices of batch entries in the cache of cross-attention.
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
    """Sets the position of the next token, so that the tokens from there on are overwritten.

    The cache of a `StateAttention` does not change, because it cannot be rewound. Tokens that it
    should not contain must be hidden by the attention mask when the prompt is processed.

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
    """Replaces the cache of self-attention by an empty one.

    The cache of cross-attention does not change.

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
    """Checks that a cache has the batch size of the inputs and is long enough for their tokens.

    Under `jit` the number of filled positions is unknown. Only the number of new tokens is then
    compared with the capacity, and tokens that do not fit overwrite the last positions.

    Raises:
        UsageError: The batch sizes differ, or the cache is too small.
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
            f"past_key_values has a batch size of {min(cache_rows - {rows})}, but the tokens have "
            f"a batch size of {rows}. Pass the cache of the same batch, or make a new cache with "
            f"init_cache({rows}, ...)"
        )
    num_filled, capacity = fills[0] if fills else (0, ids.shape[-1])
    if num_filled + ids.shape[-1] > capacity:
        raise UsageError(
            f"past_key_values has a capacity of {capacity} tokens. {num_filled} of them are "
            f"filled, so {ids.shape[-1]} new tokens do not fit. Make a longer cache with "
            f"init_cache({rows}, ...)"
        )


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, index, zero, zero))
