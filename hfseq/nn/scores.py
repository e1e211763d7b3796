"""The arithmetic that every form of attention shares: scores, softmax, and the mixing of values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from hfseq.nn.visible import Visibility


def batched_dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], batch: int = 1) -> jax.Array:
    """Contract an axis of each in every entry of their first ``batch`` axes, summing in float32."""
    leading = tuple(range(batch))
    dimensions = (((axes[0],), (axes[1],)), (leading, leading))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def softmax_scale(scale: float | None, query: jax.Array) -> float:
    """Return what scores are multiplied by: ``scale``, or head_dim ** -0.5 where it is None."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def softmax_weights(
    scores: jax.Array,
    scale: float,
    bias: jax.Array | None,
    mask: jax.Array | None,
    axis: int = -1,
    softcap: float | None = None,
) -> jax.Array:
    """Return the weights, in float32, of products of queries and keys along ``axis``.

    Scaled products come no further than ``softcap`` from zero, by way of a tanh.

    A query that sees nothing has finite weights, all alike; :func:`hfseq.nn.attend` makes zero of
    what comes of them.
    """
    scores = scores * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=axis)


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Return weights (batch, heads, queries, keys) in ``query``'s type; computed in float32."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, keys)
    mask = visible.array(queries, keys)
    return softmax_weights(scores, scale, bias, mask, softcap=softcap).astype(query.dtype)


def mix_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Mix ``value`` (batch, keys, kv_heads, head_dim) by weights (batch, heads, queries, keys)."""
    batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[2]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", grouped, value, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, queries, heads, value.shape[-1]).astype(value.dtype)
