"""The arithmetic that every form of attention shares: scores, softmax, and the mixing of values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def batched_dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], batch: int = 1) -> jax.Array:
    """Contract an axis of each in every entry of their first ``batch`` axes, summing in float32."""
    leading = tuple(range(batch))
    dimensions = (((axes[0],), (axes[1],)), (leading, leading))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def softmax_scale(scale: float | None, query: jax.Array) -> float:
    """Return what scores are multiplied by: ``scale``, or head_dim ** -0.5 where it is None."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def with_causal(mask: jax.Array | None, queries: int, keys: int, offset: int) -> jax.Array:
    """Return ``mask`` without what comes later: query i sees the keys up to i + ``offset``."""
    causal = jnp.tril(jnp.ones((queries, keys), bool), offset)
    return causal if mask is None else mask & causal


def sees_any(mask: jax.Array | None, causal: bool = False) -> jax.Array | None:
    """Tell which queries see a key at all, (batch, heads, queries, 1); None where all of them do.

    ``mask`` broadcasts to (batch, heads, queries, keys); where attention is ``causal``, there are
    as many queries as keys.
    """
    if mask is None:
        return None
    if not causal:
        return mask.any(-1, keepdims=True)
    keys = mask.shape[-1]
    if mask.shape[-2] > 1:
        return with_causal(mask, keys, keys, 0).any(-1, keepdims=True)
    first = jnp.where(mask.any(-1), mask.argmax(-1), keys)
    return jnp.arange(keys)[:, None] >= first[..., None]


def softmax_weights(
    scores: jax.Array,
    scale: float,
    bias: jax.Array | None,
    mask: jax.Array | None,
    axis: int = -1,
) -> jax.Array:
    """Return the weights, in float32, of products of queries and keys along ``axis``.

    A query that sees nothing has finite weights, all alike; :func:`hfseq.nn.attend` makes zero of
    what comes of them.
    """
    scores = scores * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=axis)


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Return weights (batch, heads, queries, keys) in ``query``'s type; computed in float32."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    if causal:
        mask = with_causal(mask, queries, keys, keys - queries)
    scores = scores.reshape(batch, heads, queries, keys)
    return softmax_weights(scores, softmax_scale(scale, query), bias, mask).astype(query.dtype)


def mix_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Mix ``value`` (batch, keys, kv_heads, head_dim) by weights (batch, heads, queries, keys)."""
    batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[2]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", grouped, value, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, queries, heads, value.shape[-1]).astype(value.dtype)


def explicit_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Attend with all weights at once; arguments as in :func:`hfseq.nn.attend`."""
    weights = attention_weights(query, key, mask=mask, bias=bias, causal=causal, scale=scale)
    return mix_values(weights, value)
