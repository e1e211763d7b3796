"""One attention for every model: a fused product where possible, explicit where it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.nn.cpu import (
    _PLAIN_OPTIONS,
    _is_decoding_on_cpu,
    _on_one_cpu,
    _scale,
    few_queries_attention,
)
from hfseq.nn.layers import dropout
from hfseq.nn.random import Keys
from hfseq.nn.stack import current_options


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

    The batch of ``query`` may be a multiple of that of ``key``: several beams that look at one
    source, whose keys are then read once. ``mask`` and ``bias`` must then be the same for all
    queries of a row.
    """
    if query.shape[0] != key.shape[0]:
        beams = query.shape[0] // key.shape[0]
        folded, weights = attend(
            query.reshape(key.shape[0], beams * query.shape[1], *query.shape[2:]), key, value,
            mask=mask, bias=bias, causal=causal, scale=scale, dropout_rate=dropout_rate, rngs=rngs,
            head_mask=head_mask, return_weights=return_weights,
        )  # fmt: skip
        return folded.reshape(query.shape), None if weights is None else _unfold(weights, beams)
    explicit = return_weights or head_mask is not None or (rngs is not None and dropout_rate > 0)
    if not explicit:
        product = current_options().attention
        return product(query, key, value, bias=bias, mask=mask, scale=scale, is_causal=causal), None
    whole = return_weights or head_mask is not None or rngs is None or dropout_rate >= 1
    fast = None if whole else _on_one_cpu(query, key, value, mask, bias)
    if rngs is not None and fast is not None:
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        return fast(
            query, key, value, mask=mask, bias=bias, causal=causal, scale=_scale(scale, query),
            rate=dropout_rate, drawn=rngs.draw(shape),
        ), None  # fmt: skip
    weights = attention_weights(query, key, mask=mask, bias=bias, causal=causal, scale=scale)
    weights = dropout(weights, dropout_rate, rngs)
    if head_mask is not None:
        weights = weights * head_mask.astype(weights.dtype)
    return _mix(weights, value), weights if return_weights else None


def _unfold(weights: jax.Array, beams: int) -> jax.Array:
    """Give every beam its own rows of weights again."""
    batch, heads, queries, keys = weights.shape
    apart = weights.reshape(batch, heads, beams, queries // beams, keys).swapaxes(1, 2)
    return apart.reshape(batch * beams, heads, queries // beams, keys)


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Softmax weights (batch, heads, queries, keys): in float32, returned in ``query``'s type."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    scale = _scale(scale, query)
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, keys) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if causal:
        below = jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
        mask = below if mask is None else mask & below
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1).astype(query.dtype)


def _mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[2]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", grouped, value, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, queries, heads, value.shape[-1]).astype(value.dtype)


def dot_product(query: Any, key: Any, value: Any, **kwargs: Any) -> jax.Array:
    """Run the attention implementation that is in force (see ``attn_implementation``)."""
    return current_options().attention(query, key, value, **kwargs)


def xla_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """``jax.nn.dot_product_attention`` as XLA compiles it; the default, right on every backend.

    On CPUs a step of decoding takes :func:`few_queries_attention`, and half types take the explicit
    form: jax asks for its second product in the half type, which XLA's CPU kernels compute in
    float32, after copies of weights and values.
    """
    if _is_decoding_on_cpu(query, key, args, kwargs):
        return few_queries_attention(query, key, value, *args, **kwargs)
    if not args and kwargs.keys() <= _PLAIN_OPTIONS:
        mask, bias = kwargs.get("mask"), kwargs.get("bias")
        fast = _on_one_cpu(query, key, value, mask, bias) if query.ndim == 4 else None
        if fast is not None:
            return fast(
                query, key, value, mask=mask, bias=bias, causal=kwargs.get("is_causal", False),
                scale=_scale(kwargs.get("scale"), query),
            )  # fmt: skip
    half = query.dtype.itemsize == 2 and jax.default_backend() == "cpu"
    if half and kwargs.keys() <= _PLAIN_OPTIONS:
        return eager_attention(query, key, value, *args, **kwargs)
    return jax.nn.dot_product_attention(query, key, value, *args, implementation="xla", **kwargs)


def cudnn_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """cuDNN's fused (flash) attention: half precision on NVIDIA GPUs only."""
    return jax.nn.dot_product_attention(query, key, value, *args, implementation="cudnn", **kwargs)


def eager_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """The explicit form: scores, softmax, mix; what PyTorch calls eager."""
    weights = attention_weights(query, key, mask=mask, bias=bias, causal=is_causal, scale=scale)
    return _mix(weights, value)


def resolve_attention(name: str | None) -> Callable[..., jax.Array]:
    """Return the attention implementation registered as ``name``; XLA's where none is named."""
    if name is None:
        return xla_attention
    from hfseq import plugins

    return plugins.load().attention.get(name)
