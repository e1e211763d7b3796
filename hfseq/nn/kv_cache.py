"""The key-value cache of autoregressive decoding, one for every family.

A cache lives on the attention module as three variables with v4's names (``cached_key``,
``cached_value``, ``cache_index``); outside the module it is the nested dict that ``init_cache``
returns and ``past_key_values`` carries. Attention to an encoder keeps the keys and values of the
encoder's output, which never change and so have no index.

A :class:`StateAttention` summarises what it has seen in entries of its own, of a size that does not
depend on the length. One of them is ``position`` (batch,), by which its caches are told apart.
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
    """Base of attentions with a cache; subclasses set ``kv_heads`` and ``head_dim``.

    ``causal`` attention to itself caches what it has seen; ``cross`` attention, which must not be
    causal, the keys and values of an encoder's output.
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
    """Base of attentions whose cache has a fixed size; ``entries`` names its parts.

    Every entry has the batch on its first axis, and ``position`` (batch,) int32, the number of
    tokens seen, is one of them. Without a cache the attributes of these names are None.
    """

    __signature__ = ConstructorSignature()
    entries: ClassVar[tuple[str, ...]] = ("position",)

    def __init__(self) -> None:
        for name in self.entries:
            setattr(self, name, nnx.data(None))

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Return the entries before the first token; ``dtype`` is that of computation."""
        raise NotImplementedError

    def read_cache(self) -> dict[str, jax.Array] | None:
        """Return the entries, or None without a cache."""
        held = {name: getattr(self, name) for name in self.entries}
        return {n: v[...] for n, v in held.items()} if held["position"] is not None else None

    def write_cache(self, entries: Mapping[str, jax.Array]) -> None:
        """Keep new entries, in the types of the old ones; without a cache they are dropped."""
        for name, value in entries.items():
            held = getattr(self, name)
            if held is not None:
                held.set_value(value.astype(held[...].dtype))


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """How much an empty cache holds; ``encoder`` is (rows, tokens) of the encoder, if cached."""

    batch_size: int
    max_length: int
    encoder: tuple[int, int] | None = None


def add_cache(module: nnx.Module, size: CacheSize, dtype: DTypeLike) -> None:
    """Give every causal attention, and cross-attention if wanted, an empty cache."""
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


def empty_cache(module: nnx.Module, shapes: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the empty cache of ``module``, whose variables may be abstract and stacked.

    ``shapes`` is the cache with ``jax.ShapeDtypeStruct`` leaves.
    """
    states = {
        tuple(map(str, path)): part
        for path, part in nnx.iter_graph(module)
        if isinstance(part, StateAttention)
    }

    def make(cache: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        made = {}
        if path in states:
            made = states[path].empty_cache(batch_size, jnp.float32)
        return {
            name: make(leaf, (*path, name))
            if isinstance(leaf, Mapping)
            else jnp.broadcast_to(made.get(name, 0), leaf.shape).astype(leaf.dtype)
            for name, leaf in cache.items()
        }

    return make(shapes, ())


def extend_cache(
    module: CachedAttention,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
) -> tuple[jax.Array, jax.Array, Mask, bool]:
    """Append ``key`` and ``value`` to the cache and return what the queries attend to.

    Without a cache the inputs come back with ``causal=True``: the fused attention masks the future.
    With one, keys and values of the whole buffer come back with a mask that hides positions not yet
    written, and those outside of the window that ``mask`` may describe.
    """
    if module.cached_key is None:
        return key, value, mask, True
    index, new = module.cache_index[...], key.shape[1]
    full_key = _write(module.cached_key[...], key, index)
    full_value = _write(module.cached_value[...], value, index)
    module.cached_key[...], module.cached_value[...] = full_key, full_value
    module.cache_index[...] = index + new
    described, keys, dtype = as_visibility(mask, causal=True), full_key.shape[1], key.dtype
    written, shown = described.band(new, keys, index), described.without_band(keys)
    assert written is not None
    visible = written[None, None] if shown is None else shown & written
    return full_key.astype(dtype), full_value.astype(dtype), visible, False


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


def _is_state(cache: Mapping[str, Any]) -> bool:
    return "position" in cache


def _grows(cache: Mapping[str, Any]) -> bool:
    return "cache_index" in cache


def _map_entries(cache: Mapping[str, Any], change: Callable[[dict[str, Any]], Any]) -> Any:
    """Apply ``change`` to the entries of attention to itself, whatever their depth."""
    if _grows(cache) or _is_state(cache):
        return change(dict(cache))
    return {
        name: _map_entries(part, change) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def _take(entry: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Pick rows of an entry, whose layers may be stacked."""
    if _is_state(entry):
        axis, names = entry["position"].ndim - 1, tuple(entry)
    else:  # (batch, length, heads, head_dim), after a layer axis where layers are scanned
        axis, names = entry["cached_key"].ndim - 4, ("cached_key", "cached_value")
    # (clip: rows are in bounds, and the default looks again at every element)
    taken = {name: jnp.take(entry[name], rows, axis=axis, mode="clip") for name in names}
    return {**entry, **taken}


def reorder(cache: Mapping[str, Any], rows: jax.Array) -> dict[str, Any]:
    """Pick rows of the cache, as beam search does; what belongs to the encoder stays as it is."""
    return _map_entries(cache, lambda entry: _take(entry, rows))


def select_rows(
    cache: Mapping[str, Any], rows: jax.Array, encoder_rows: jax.Array
) -> dict[str, Any]:
    """Keep some rows: ``rows`` of the decoder's entries, ``encoder_rows`` of the encoder's."""
    if _grows(cache) or _is_state(cache):
        return _take(cache, rows)
    if "cached_key" in cache:
        return _take(cache, encoder_rows)
    return {
        name: select_rows(part, rows, encoder_rows) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def rewind(cache: Mapping[str, Any], index: int | jax.Array) -> dict[str, Any]:
    """Let the next token be written at ``index``; what lies there and after it is overwritten.

    A state keeps what it has seen: its prompt must hide what does not belong to it.
    """

    def move(entry: dict[str, Any]) -> dict[str, Any]:
        if _is_state(entry):
            return entry
        return {**entry, "cache_index": jnp.full_like(entry["cache_index"], index)}

    return _map_entries(cache, move)


def restart(cache: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the entries of attention to itself by those of ``fresh``, an empty cache.

    What belongs to the encoder stays as it is.
    """
    if _grows(cache) or _is_state(cache):
        return dict(fresh)
    return {
        name: restart(part, fresh[name]) if isinstance(part, Mapping) else part
        for name, part in cache.items()
    }


def check_capacity(cache: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Refuse a cache made for another number of rows than the tokens have, or without room.

    Under ``jit`` nobody knows yet how full a cache is: what is too much takes the last places.
    """
    ids = next((v for n, v in inputs.items() if n.endswith("input_ids")), None)
    if ids is None:
        return
    full: list[tuple[int, int]] = []  # tokens taken, and room
    wanted, given = set(), len(ids)

    def add_rows(entry: dict[str, Any]) -> None:
        if _is_state(entry):
            wanted.add(entry["position"].shape[-1])
            return
        wanted.add(entry["cached_key"].shape[-4])
        taken, room = entry["cache_index"], entry["cached_key"].shape[-3]
        if not full and not isinstance(taken, jax.core.Tracer):
            full.append((int(np.max(taken)), room))

    _map_entries(cache, add_rows)
    if wanted - {given}:
        raise UsageError(
            f"past_key_values was made for {min(wanted - {given})} rows, the tokens have {given}: "
            f"pass the cache of the same batch, or init_cache({given}, ...) for a fresh one"
        )
    taken, room = full[0] if full else (0, ids.shape[-1])
    if taken + ids.shape[-1] > room:
        raise UsageError(
            f"past_key_values has room for {room} tokens, {taken} are taken and "
            f"{ids.shape[-1]} come: make a longer cache, init_cache({given}, ...)"
        )


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    zero = jnp.zeros((), index.dtype)
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (zero, index, zero, zero))
