"""Products, norms, normalization and attention with the semantics of PyTorch's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfseq.nn.attention import attend
from hfseq.nn.random import Keys

Array = jax.Array


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Computes `x @ weight.T + bias` for a weight of shape `(out, in)`."""
    y = lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias.astype(x.dtype)


def baddbmm(c: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    """Computes `beta * c + alpha * (a @ b)`."""
    product = alpha * jnp.matmul(a, b)
    return product if beta == 0 else beta * c + product


def norm(
    x: Array, p: float | str | None = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    """Computes the vector norm of order `p`. The gradient of the norm of zeros is zero."""
    size = jnp.abs(x) if dtype is None else jnp.abs(x).astype(dtype)
    order = 2.0 if p is None or isinstance(p, str) else p  # a string names the Frobenius norm
    axes = tuple(dim) if isinstance(dim, list | tuple) else dim
    if order == math.inf:
        return size.max(axes, keepdims=keepdim)
    if order == -math.inf:
        return size.min(axes, keepdims=keepdim)
    if order == 0:
        return (size != 0).sum(axes, keepdims=keepdim).astype(size.dtype)
    if order == 1:
        return size.sum(axes, keepdims=keepdim)
    total = (jnp.square(size) if order == 2 else size**order).sum(axes, keepdims=keepdim)
    is_zero = total == 0
    return jnp.where(is_zero, 0, jnp.where(is_zero, 1, total) ** (1 / order))


def normalize(x: Array, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Array:
    """Divides vectors along an axis by their norm, or by `eps` if that is larger."""
    return x / jnp.maximum(norm(x, p, dim, keepdim=True), eps)


def cosine_similarity(a: Array, b: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    """Returns the cosine of the angle between vectors along an axis."""
    a, b = (x / jnp.maximum(norm(x, 2, dim, keepdim=True), eps) for x in (a, b))
    return (a * b).sum(dim)


def _standardize(x: Array, axes: Any, eps: float) -> Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(axes, keepdims=True)
    return y * lax.rsqrt(jnp.square(y).mean(axes, keepdims=True) + eps)


def _affine(x: Array, weight: Array | None, bias: Array | None, dtype: Any) -> Array:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).astype(dtype)


def layer_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalizes over the last axes in float32. Their sizes are `normalized_shape`."""
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return _affine(_standardize(x, tuple(range(-count, 0)), eps), weight, bias, x.dtype)


def rms_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> Array:
    """Divides `x` by its root mean square over the last axes, which is computed in float32."""
    axes = tuple(range(-len(normalized_shape), 0))
    y = x.astype(jnp.float32)
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = y * lax.rsqrt(jnp.square(y).mean(axes, keepdims=True) + eps)
    return _affine(y, weight, None, x.dtype)


def _of_channels(x: Array | None, ndim: int) -> Array | None:
    return None if x is None else x.reshape(-1, *(1,) * (ndim - 2))


def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalizes groups of channels of an array `(batch, channels, ...)` in float32."""
    y = _standardize(x.reshape(x.shape[0], num_groups, -1), -1, eps).reshape(x.shape)
    return _affine(y, _of_channels(weight, x.ndim), _of_channels(bias, x.ndim), x.dtype)


def batch_norm(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalizes the channels of an array `(batch, channels, ...)` with stored statistics."""
    mean, variance = (_of_channels(value, x.ndim) for value in (running_mean, running_var))
    assert mean is not None and variance is not None
    y = (x.astype(jnp.float32) - mean) * lax.rsqrt(variance + eps)
    return _affine(y, _of_channels(weight, x.ndim), _of_channels(bias, x.ndim), x.dtype)


def weight_norm(direction: Array, length: Array, dim: int = 0) -> Array:
    """Rescales each slice of `direction` along an axis to the norm that `length` gives for it."""
    axes = tuple(axis for axis in range(direction.ndim) if axis != dim % direction.ndim)
    return direction * (length / jnp.sqrt(jnp.square(direction).sum(axes, keepdims=True)))


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    rngs: Keys | None = None,
) -> Array:
    """Computes attention for arrays of shape `(batch, heads, length, head_dim)`.

    Args:
        query: Queries, `(batch, heads, queries, head_dim)`.
        key: Keys, `(batch, heads, keys, head_dim)`.
        value: Values, `(batch, heads, keys, head_dim)`.
        attn_mask: Booleans that are true for visible keys, or numbers that are added to the scores.
            The mask broadcasts to `(batch, heads, queries, keys)`.
        dropout_p: Dropout rate of the attention weights.
        is_causal: Whether a query only attends to keys at or before its position. The first query
            and the first key have the same position.
        scale: Factor of the scores. Default: `head_dim**-0.5`.
        rngs: Random keys for dropout, or `None` in evaluation.
    """
    mask, bias = None, None
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
        mask, bias = (attn_mask, None) if attn_mask.dtype == bool else (None, attn_mask)
    if is_causal and query.shape[2] != key.shape[2]:
        mask, is_causal = jnp.tril(jnp.ones((1, 1, query.shape[2], key.shape[2]), bool)), False
    heads = (x.swapaxes(1, 2) for x in (query, key, value))
    outputs, _ = attend(
        *heads, mask=mask, bias=bias, causal=is_causal, scale=scale,
        dropout_rate=dropout_p, rngs=rngs,
    )  # fmt: skip
    return outputs.swapaxes(1, 2)
