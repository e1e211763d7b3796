"""The loss that most objectives share: cross-entropy over a vocabulary, in few passes over it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.data.batches import IGNORE_INDEX
from hfseq.nn.cpu import fast_argmax, is_single_cpu, largest_divisor

# Logits that are looked at together on a CPU: a mebibyte of float32, which its caches hold.
CHUNK_LOGITS = 2**18


def cross_entropy(
    logits: jax.Array, labels: jax.Array, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum cross-entropy over labels that are not -100; returns (sum, count, number right).

    Logits are (..., vocabulary) in any type, the sum is float32. Columns from ``vocab_size`` on are
    padding for the tensor axis and get no probability.
    """
    total, _, count, right = smoothed_cross_entropy(logits, labels, vocab_size, 0.0)
    return total, count, right


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, vocab_size: int | None, smoothing: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sum the loss with label smoothing; returns (sum, cross-entropy, count, number right).

    The target is 1 - ``smoothing`` for the label, and smoothing / (V - 1) for each other entry of
    the vocabulary (Szegedy et al., 2015, section 7, in the form of Flax's WMT example). Its entropy
    is subtracted, so that the loss is a divergence, 0 for the best prediction. PyTorch's
    ``CrossEntropyLoss(label_smoothing=s)`` spreads s / V over all entries, the label too, and
    subtracts nothing: its gradient is that of s (V - 1) / V here. See :func:`cross_entropy` for
    the arguments.
    """
    size = logits.shape[-1] if vocab_size is None else min(vocab_size, logits.shape[-1])
    if logits.shape[-1] > size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)
    wanted = labels != IGNORE_INDEX
    safe = jnp.where(wanted, labels, 0)
    losses, plain, best = _label_losses(logits, safe, smoothing, size)
    total, plain_total = (jnp.where(wanted, part, 0.0).sum() for part in (losses, plain))
    return total, plain_total, wanted.sum(), (wanted & (best == safe)).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _label_losses(
    logits: jax.Array, labels: jax.Array, smoothing: float, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Smoothed and plain cross-entropy and the most probable id at each place, in few passes.

    The derivative, softmax - target, is written out: automatic differentiation would scatter into
    another array of the logits' size, and keep the softmax. Only ``size`` columns are real.
    """
    return _label_losses_forward(logits, labels, smoothing, size)[0]


def _label_losses_forward(logits: jax.Array, labels: jax.Array, smoothing: float, size: int) -> Any:
    few = rows_per_chunk(logits)
    if few == labels.size:
        losses, plain, best, total = _losses(logits, labels, smoothing, size)
    else:
        # Of the shape that the way back takes, so that what made the logits is computed once.
        flat = _bits(logits).reshape(-1, logits.shape[-1])

        def part(given: tuple[jax.Array, jax.Array]) -> Any:
            start, ids = given
            rows = jax.lax.dynamic_slice_in_dim(flat, start, few)
            return _losses(_floats(rows, logits.dtype), ids, smoothing, size)

        rows = jax.lax.map(part, (jnp.arange(0, labels.size, few), labels.reshape(-1, few)))
        losses, plain, best, total = (leaf.reshape(labels.shape) for leaf in rows)
    return (losses, plain, best), (logits, labels, total)


def _losses(logits: jax.Array, labels: jax.Array, smoothing: float, size: int) -> Any:
    """Return both losses, the most probable id and the logarithm of the partition function."""
    wide = logits.astype(jnp.float32)
    top = wide.max(-1)
    total = jnp.log(jnp.exp(wide - top[..., None]).sum(-1)) + top
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    plain = losses = total - picked
    if smoothing:
        other = smoothing / (size - 1)
        # Summed along with the exponentials; sums of the logits themselves would lose digits.
        rest = size * (total - top) - _real(wide - top[..., None], size).sum(-1)
        entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(other)
        losses = (1 - smoothing - other) * plain + other * rest - entropy
    return losses, plain, fast_argmax(wide, top), total


def _label_losses_backward(smoothing: float, size: int, saved: Any, cotangents: Any) -> Any:
    logits, labels, total = saved
    smoothed, plain, _ = cotangents
    few = rows_per_chunk(logits)
    if few == labels.size:
        return _change(logits, labels, total, smoothed, plain, smoothing, size), None
    shape = logits.shape
    columns = [leaf.reshape(-1) for leaf in (labels, total, smoothed, plain)]

    def body(number: jax.Array, flat: jax.Array) -> jax.Array:
        start = number * few
        part, ids, sums, first, second = [
            jax.lax.dynamic_slice_in_dim(leaf, start, few) for leaf in (flat, *columns)
        ]
        changed = _change(_floats(part, logits.dtype), ids, sums, first, second, smoothing, size)
        return jax.lax.dynamic_update_slice_in_dim(flat, _bits(changed), start, 0)

    # The logits turn into their derivative where they lie: there is one array of this size.
    flat = jax.lax.fori_loop(0, labels.size // few, body, _bits(logits).reshape(-1, shape[-1]))
    return _floats(flat, logits.dtype).reshape(shape), None


def _bits(x: jax.Array) -> jax.Array:
    """View bfloat16 as integers: in a loop XLA for CPUs widens the whole array each time round.

    The loss of 1,024 x 50,257 logits took 3.9 s of CPU time instead of 0.2.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _floats(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _change(
    logits: jax.Array,
    labels: jax.Array,
    total: jax.Array,
    smoothed: jax.Array,
    plain: jax.Array,
    smoothing: float,
    size: int,
) -> jax.Array:
    """Return the derivative for the logits, given that of both losses at each place."""
    smoothed, plain = smoothed[..., None], plain[..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    if not smoothing:
        change = (probabilities - (ids == labels[..., None])) * (smoothed + plain)
        return change.astype(logits.dtype)
    other = smoothing / (size - 1)
    picked = jnp.where(ids == labels[..., None], (1 - smoothing - other) * smoothed + plain, 0.0)
    change = _real(probabilities * (smoothed + plain) - other * smoothed, size) - picked
    return change.astype(logits.dtype)


_label_losses.defvjp(_label_losses_forward, _label_losses_backward)


def rows_per_chunk(logits: jax.Array) -> int:
    """Return how many rows of ``logits`` (..., vocabulary) to look at together: all, or a few.

    On a CPU several passes over rows that stay in its caches take half of the time of passes over
    all (docs/benchmarks.md).
    """
    rows = math.prod(logits.shape[:-1])
    if not is_single_cpu():
        return rows
    return largest_divisor(rows, CHUNK_LOGITS // logits.shape[-1]) if rows else 0


def _real(x: jax.Array, size: int) -> jax.Array:
    """Set columns from ``size`` on to 0; comparing columns is slow on a CPU, so only if need be."""
    return x if x.shape[-1] == size else jnp.where(jnp.arange(x.shape[-1]) < size, x, 0.0)
