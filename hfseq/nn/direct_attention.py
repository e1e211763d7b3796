"""Attention with its derivative written out, for one CPU whose caches hold all of the scores.

Differentiated automatically, heads are put first again and again, and products come out transposed;
here keys, queries and values are laid out once, and every product takes them as they lie: three
quarters of the time (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.nn.host import one_cpu
from hfseq.nn.layers import drop
from hfseq.nn.random import Drawn


def suits(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, bias: Any) -> bool:
    """Tell whether :func:`direct_attention` takes these, (batch, length, heads, head_dim)."""
    plain = all(x.ndim == 4 and x.dtype == jnp.float32 for x in (query, key, value))
    return (
        plain
        and query.shape[2] == key.shape[2]
        and all(x is None or x.ndim == 4 for x in (mask, bias))
        and one_cpu()
    )


def direct_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None,
    bias: jax.Array | None,
    causal: bool,
    scale: float,
    rate: float = 0.0,
    drawn: Drawn | None = None,
) -> jax.Array:
    """Attend as :func:`hfseq.nn.attend` does, which has the arguments; see :func:`suits`.

    ``drawn`` are the random bits of all weights, of which ``rate`` are dropped.
    """
    if causal:
        queries, keys = query.shape[1], key.shape[1]
        below = jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
        mask = below[None, None] if mask is None else mask & below
    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
    bits = None if drawn is None else drawn.all()
    return _attend(scale, rate, *heads_first, mask, bias, bits).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    scale: float, rate: float, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any,
    bits: Any,
) -> jax.Array:  # fmt: skip
    """Attend with heads before positions; all weights are (batch, heads, queries, keys)."""
    return _forward(scale, rate, q, k, v, mask, bias, bits)[0]


def _forward(
    scale: float, rate: float, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any,
    bits: Any,
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    scores = _dot(q, k, (3, 3)) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = _dot(_dropped(weights, rate, bits), v, (3, 2))
    return mixed, (q, k, v, mask, bias, bits, weights)


def _backward(scale: float, rate: float, saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    q, k, v, mask, bias, bits, weights = saved
    dv = _dot(_dropped(weights, rate, bits), g, (2, 2))
    change = _dropped(_dot(g, v, (3, 3)), rate, bits)
    change = weights * (change - (weights * change).sum(-1, keepdims=True))
    if mask is not None:  # a row that sees nothing has weights all the same
        change = jnp.where(mask, change, 0.0)
    dbias = None if bias is None else _sum_to(change, bias)
    change = change * scale
    return _dot(change, k, (3, 2)), _dot(change, q, (2, 2)), dv, None, dbias, None


_attend.defvjp(_forward, _backward)


def _dropped(x: jax.Array, rate: float, bits: jax.Array | None) -> jax.Array:
    return x if bits is None else drop(x, rate, bits)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract an axis of each, in every row and head."""
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0, 1), (0, 1))))


def _sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over the axes along which ``like`` was repeated."""
    axes = tuple(axis for axis in range(x.ndim) if like.shape[axis] != x.shape[axis])
    return x.sum(axes, keepdims=True).astype(like.dtype)
