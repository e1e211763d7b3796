"""One attention for every model: a fused product where possible, explicit where it must be.

:func:`attend` is what model files call. It takes the implementation that was named
(``attn_implementation``; XLA's by default), unless weights have to be seen or changed. What is
fastest on CPUs is chosen in :mod:`hfseq.nn.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.nn import cpu
from hfseq.nn.context import current_options
from hfseq.nn.layers import dropout
from hfseq.nn.random import Keys
from hfseq.nn.scores import (
    attention_weights,
    explicit_attention,
    mix_values,
    sees_any,
    softmax_scale,
    with_causal,
)


def attention_mask(
    attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Build a boolean mask that broadcasts to (batch, heads, queries, keys); True is visible.

    ``attention_mask`` is (batch, keys), non-zero where a key may be seen, or (batch, queries,
    keys). ``segment_ids`` (batch, length) restricts every query to keys of its own document; 0 is
    padding.
    """
    mask = None
    if attention_mask is not None:
        visible = attention_mask.astype(bool)
        mask = visible[:, None, None, :] if visible.ndim == 2 else visible[:, None, :, :]
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    return mask


def cross_attention_mask(
    encoder_attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Build the mask of a decoder's attention to an encoder, (batch, heads, queries, keys).

    ``encoder_attention_mask`` is (batch, keys). With the segments of both sides, (batch, keys) and
    (batch, queries), a target sees only the source that was packed under its number.
    """
    mask = attention_mask(encoder_attention_mask)
    if segment_ids is None or decoder_segment_ids is None:
        return mask
    same = (decoder_segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return same if mask is None else mask & same


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    rngs: Keys | None = None,
    head_mask: jax.Array | None = None,
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Multi-head attention; returns (batch, queries, heads, head_dim) and the weights if asked for.

    **Arguments:** ``query`` (batch, queries, heads, head_dim); ``key`` and ``value`` (batch, keys,
    kv_heads, head_dim), where ``heads`` is a multiple of ``kv_heads`` (grouped queries); ``mask``
    boolean and ``bias`` additive, both broadcast to (batch, heads, queries, keys); ``scale``
    defaults to head_dim ** -0.5. The explicit form runs only where dropout on the weights, a head
    mask or the weights themselves are wanted; else the implementation chosen by name does.

    Whatever runs, ``causal`` attention is aligned at the end (the last query sees the last key,
    also where there are more or fewer queries than keys), and a query that sees no key gives zero
    and passes no gradient on.

    The batch of ``query`` may be a multiple of that of ``key``: several beams that look at one
    source, whose keys are then read once. ``mask`` and ``bias`` must then be the same for all
    queries of a row.
    """
    if query.shape[0] != key.shape[0]:
        beams = query.shape[0] // key.shape[0]
        if causal:
            mask = _aligned_at_end(mask, query.shape[1], key.shape[1])
            mask, causal = jnp.tile(mask, (1, 1, beams, 1)), False
        folded, weights = attend(
            query.reshape(key.shape[0], beams * query.shape[1], *query.shape[2:]), key, value,
            mask=mask, bias=bias, causal=causal, scale=scale, dropout_rate=dropout_rate, rngs=rngs,
            head_mask=head_mask, return_weights=return_weights,
        )  # fmt: skip
        if weights is not None:  # every beam gets its own rows of weights again
            rows, heads, _, keys = weights.shape
            weights = weights.reshape(rows, heads, beams, -1, keys).swapaxes(1, 2)
            weights = weights.reshape(rows * beams, heads, -1, keys)
        return folded.reshape(query.shape), weights
    if causal and query.shape[1] != key.shape[1]:
        mask, causal = _aligned_at_end(mask, query.shape[1], key.shape[1]), False
    if rngs is None or dropout_rate <= 0:
        if not return_weights and head_mask is None:
            mixed = dot_product(query, key, value, bias, mask, is_causal=causal, scale=scale)
            return mixed, None
    elif dropout_rate < 1 and not return_weights and head_mask is None:
        form = cpu.attention_form(query, key, value, mask, bias, causal=causal, dropped=True)
        if form is not None:
            shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
            mixed = form(
                query, key, value, mask=mask, bias=bias, causal=causal,
                scale=softmax_scale(scale, query), rate=dropout_rate, drawn=rngs.draw(shape),
            )  # fmt: skip
            return _zero_where_blind(mixed, sees_any(mask, causal)), None
    weights = attention_weights(query, key, mask=mask, bias=bias, causal=causal, scale=scale)
    weights = dropout(weights, dropout_rate, rngs)
    if head_mask is not None:
        weights = weights * head_mask.astype(weights.dtype)
    seeing = sees_any(mask, causal)
    mixed = _zero_where_blind(mix_values(weights, value), seeing)
    if not return_weights:
        return mixed, None
    return mixed, weights if seeing is None else jnp.where(seeing, weights, 0)


def dot_product(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    **options: Any,
) -> jax.Array:
    """Run the attention implementation that is in force (see ``attn_implementation``).

    Arguments are those of ``jax.nn.dot_product_attention``. What implementations do not agree on is
    made one here, as :func:`attend` says: causal attention of more or fewer queries than keys comes
    to them as a mask, and what they return for a query that sees nothing is replaced by zero.
    """
    queries, keys = query.shape[-3], key.shape[-3]
    if is_causal and queries != keys:
        mask, is_causal = _aligned_at_end(mask, queries, keys), False
    shown, lengths = mask, options.get("key_value_seq_lengths")
    if lengths is not None:
        within = (jnp.arange(keys) < lengths[:, None])[:, None, None]
        shown = within if mask is None else mask & within
    seeing = sees_any(shown, is_causal)
    product = current_options().attention
    if seeing is not None and mask is not None and product not in _FINITE:
        # Not a number times the gradient zero is not a number: it sees all, which then is dropped.
        mask = mask | ~seeing
    mixed = product(query, key, value, bias=bias, mask=mask, is_causal=is_causal, **options)
    return _zero_where_blind(mixed, seeing)


def _aligned_at_end(mask: jax.Array | None, queries: int, keys: int) -> jax.Array:
    """Return ``mask`` with what the last query and those before it see of the past."""
    mask = with_causal(mask, queries, keys, keys - queries)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _zero_where_blind(mixed: jax.Array, seeing: jax.Array | None) -> jax.Array:
    """Zero what queries returned that see nothing, and so stop its gradient."""
    if seeing is None:
        return mixed
    seeing = seeing.reshape((1,) * (4 - seeing.ndim) + seeing.shape).swapaxes(1, 2)
    return jnp.where(seeing, mixed, 0).reshape(mixed.shape).astype(mixed.dtype)


# -- the implementations that plugins register by name
# ---------------------------------------------------------------------------------------


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    **others: Any,
) -> jax.Array:
    """``jax.nn.dot_product_attention`` as XLA compiles it; the default, right on every backend.

    On CPUs another form is taken where it is faster (:func:`hfseq.nn.cpu.attention_form`).
    """
    form = None if others else cpu.attention_form(query, key, value, mask, bias, causal=is_causal)
    if form is not None:
        scale = softmax_scale(scale, query)
        return form(query, key, value, mask=mask, bias=bias, causal=is_causal, scale=scale)
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, implementation="xla",
        **others,
    )  # fmt: skip


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """cuDNN's fused (flash) attention: half precision on NVIDIA GPUs only.

    The kernel takes masks and biases of all queries and keys alone, so those that hold for every
    query (padding) are written down for each.
    """
    size = query.shape[-3], key.shape[-3]
    bias, mask = (
        x if x is None else jnp.broadcast_to(x, (*x.shape[:-2], *size)) for x in (bias, mask)
    )
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, implementation="cudnn", **options
    )


def eager_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """The explicit form: scores, softmax, mix; what PyTorch calls eager."""
    return explicit_attention(
        query, key, value, mask=mask, bias=bias, causal=is_causal, scale=scale
    )


# Those that return a number, whatever it is, for a query that sees nothing.
_FINITE = (xla_attention, cudnn_attention, eager_attention, jax.nn.dot_product_attention)


def resolve_attention(name: str | None) -> Callable[..., jax.Array]:
    """Return the attention implementation registered as ``name``; XLA's where none is named."""
    if name is None:
        return xla_attention
    from hfseq import plugins

    return plugins.load().attention.get(name)
