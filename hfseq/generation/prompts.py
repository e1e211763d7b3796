"""Prompts before anything is computed: checked, padded on the left, and put into buckets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.errors import UsageError


def is_static(*trees: Any) -> bool:
    """Tell whether values cannot be looked at: under a transformation, or on other hosts."""
    return any(
        isinstance(leaf, jax.core.Tracer)
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
        for leaf in jax.tree.leaves(trees)
    )


def as_ids(name: str, ids: Any, static: bool) -> Any:
    """Return token ids (rows, length) as int32; UsageError says what else was given."""
    if isinstance(ids, (list, tuple)):
        ids = _rectangular(name, ids)
    if not hasattr(ids, "ndim") or ids.ndim != 2:
        shape = f"the shape {tuple(ids.shape)}" if hasattr(ids, "shape") else f"type {type(ids)}"
        raise UsageError(
            f"generate: {name} has to be (batch, length), but has {shape}; one prompt is a batch "
            "of one: ids[None]"
        )
    if not static:
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) and ids.size:
        raise UsageError(f"generate: {name} holds {ids.dtype}, token ids are integers")
    return ids.astype(np.int32)


def _rectangular(name: str, rows: Any) -> np.ndarray:
    try:
        return np.asarray(rows)
    except ValueError:
        raise UsageError(
            f"generate: the rows of {name} have different lengths: pad them and pass the "
            'attention_mask too, as tokenizer(texts, padding=True, return_tensors="np") gives both'
        ) from None


def check_vocabulary(name: str, ids: Any, vocab_size: int | None) -> None:
    """Refuse ids that have no embedding; JAX would go on with NaN."""
    if vocab_size and isinstance(ids, np.ndarray) and ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"generate: {name} holds {low if low < 0 else high}, outside of the model's "
                f"vocabulary of {vocab_size}: use the tokenizer that belongs to the model"
            )


def as_mask(name: str, mask: Any, ids: Any, static: bool) -> Any:
    """Return an attention mask as int32 of the shape of ``ids``; bool and floats are accepted."""
    if isinstance(mask, (list, tuple)):
        mask = _rectangular(name, mask)
    if tuple(mask.shape) != tuple(ids.shape):
        raise UsageError(
            f"generate: {name} has the shape {tuple(mask.shape)}, the tokens have "
            f"{tuple(ids.shape)}: pass the mask that the tokenizer gave with them"
        )
    if static:
        return (jnp.asarray(mask) != 0).astype(jnp.int32)
    mask = (np.asarray(mask) != 0).astype(np.int32)
    empty = np.flatnonzero(mask.sum(-1) == 0)
    if mask.size and empty.size:
        raise UsageError(
            f"generate: {name} hides every token of row {empty[0]}: a prompt needs at least one"
        )
    return mask


def infer_mask(ids: Any, pad: int | None, eos: tuple[int, ...]) -> Any:
    """Return the mask of a prompt that came without: padding hides, unless it also ends texts.

    This is PyTorch's rule. ``None`` where all is visible for certain.
    """
    if pad is None or pad in eos:
        return None
    return (ids != pad).astype(np.int32)


def pad_left(ids: Any, mask: Any) -> tuple[Any, Any]:
    """Move padding at the end of rows to their beginning: new tokens follow the last column."""
    numpy = isinstance(ids, np.ndarray) and isinstance(mask, np.ndarray)
    xp: Any = np if numpy else jnp
    trailing = xp.argmax(mask[:, ::-1] != 0, axis=1)
    if numpy and not trailing.any():
        return ids, mask
    places = (xp.arange(ids.shape[1])[None] - trailing[:, None]) % ids.shape[1]
    return xp.take_along_axis(ids, places, axis=1), xp.take_along_axis(mask, places, axis=1)


def widen(ids: np.ndarray, width: int, value: int = 0) -> np.ndarray:
    """Fill rows up with ``value`` on the right, to a bucket; token 0 has an embedding for sure."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=value)


def place_like(source: Any, arrays: Any) -> Any:
    """Distribute ``arrays`` over devices as the rows of ``source`` are, if they are."""
    sharding = getattr(source, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return arrays
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return jax.tree.map(lambda array: jax.device_put(array, rows), arrays)
