"""Computations that attention implementations share: scores, softmax, and weighted values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from hfseq.nn.visible import Visibility


def batched_dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], batch: int = 1) -> jax.Array:
    """Computes a batched matrix multiplication with float32 accumulation.

    Args:
        a: The left operand.
        b: The right operand.
        axes: The contracted axis of `a` and the contracted axis of `b`.
        batch: Number of leading axes that are batch axes of both operands.

    Returns:
        A float32 array. Its axes are the batch axes, the other axes of `a`, and the other axes of
        `b`.
    """
    leading = tuple(range(batch))
    dimensions = (((axes[0],), (axes[1],)), (leading, leading))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def softmax_scale(scale: float | None, query: jax.Array) -> float:
    """Returns `scale`, or `head_dim ** -0.5` if it is `None`."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def softmax_weights(
    scores: jax.Array,
    scale: float,
    bias: jax.Array | None,
    mask: jax.Array | None,
    axis: int = -1,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes attention weights from the dot products of queries and keys.

    A fully masked query gets finite, uniform weights. `hfseq.nn.attend` replaces its output by
    zeros.

    Args:
        scores: Dot products of queries and keys, float32.
        scale: Factor of the scores.
        bias: Added to the scaled scores.
        mask: Boolean, True where a key is visible.
        axis: The axis of the keys.
        softcap: Limits scaled scores to this absolute value with a tanh.
        sinks: Scores that take part in the softmax without a weight in the result. They broadcast
            to `scores`, where the axis of the keys has the size 1.

    Returns:
        The weights, float32, of the shape of `scores`.
    """
    scores = scores * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        return jax.nn.softmax(scores, axis=axis)
    total = jax.nn.logsumexp(scores, axis=axis, keepdims=True)
    return jnp.exp(scores - jnp.logaddexp(total, sinks.astype(jnp.float32)))


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes attention weights in float32.

    Args:
        query: `(batch, queries, heads, head_dim)`.
        key: `(batch, keys, kv_heads, head_dim)`.
        visible: Which keys each query may attend to.
        bias: Added to the scaled scores; broadcasts to `(batch, heads, queries, keys)`.
        scale: Factor of the scores.
        softcap: Limits scaled scores to this absolute value.
        sinks: Attention sinks, `(heads,)`, or `None`.

    Returns:
        The weights, `(batch, heads, queries, keys)`, in the dtype of `query`.
    """
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, keys)
    mask = visible.array(queries, keys)
    if sinks is not None:
        sinks = sinks[:, None, None]
    weights = softmax_weights(scores, scale, bias, mask, softcap=softcap, sinks=sinks)
    return weights.astype(query.dtype)


def mix_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the weighted sums of the values.

    Args:
        weights: `(batch, heads, queries, keys)`.
        value: `(batch, keys, kv_heads, head_dim)`.

    Returns:
        `(batch, queries, heads, head_dim)` in the dtype of `value`.
    """
    batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[2]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", grouped, value, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, queries, heads, value.shape[-1]).astype(value.dtype)
