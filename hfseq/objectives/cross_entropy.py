"""Cross-entropy over a vocabulary, with as few passes over the logits as possible."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.data.batches import IGNORE_INDEX
from hfseq.nn.cpu import fast_argmax, is_single_cpu, largest_divisor
from hfseq.nn.logits import DeferredLogits, map_logits

# Number of logits that are processed together on a CPU: 1 MiB of float32, which fits in its caches.
CHUNK_LOGITS = 2**18


def cross_entropy(
    logits: jax.Array | DeferredLogits, labels: jax.Array, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the cross-entropy over all labels that are not -100.

    Args:
        logits: Logits, `(..., vocab_size)`, in any float dtype. Sums are float32. The loss of
            deferred logits is computed for a part of the positions at a time.
        labels: Target IDs, `(...)`. Positions with -100 are ignored.
        vocab_size: Size of the vocabulary. Columns of ``logits`` beyond ``vocab_size`` only pad the
            last axis to a multiple of the size of the ``tensor`` mesh axis. They have probability
            0.

    Returns:
        The sum of the losses, the number of targets, and the number of correct predictions.
    """
    total, _, count, correct = smoothed_cross_entropy(logits, labels, vocab_size, 0.0)
    return total, count, correct


def smoothed_cross_entropy(
    logits: jax.Array | DeferredLogits,
    labels: jax.Array,
    vocab_size: int | None,
    smoothing: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sums the label-smoothed loss over all labels that are not -100.

    With a vocabulary of V entries, the target distribution is 1 - ``smoothing`` for the label and
    ``smoothing`` / (V - 1) for each other entry (Szegedy et al., 2015, section 7, in the form of
    Flax's WMT example). The entropy of the target distribution is subtracted from the
    cross-entropy, so that the loss of a perfect prediction is 0.

    PyTorch's ``CrossEntropyLoss(label_smoothing=s)`` adds s / V to all entries, including the
    label, and does not subtract the entropy. Its gradient equals the gradient of this function with
    ``smoothing`` = s (V - 1) / V.

    Args:
        logits: See :func:`cross_entropy`.
        labels: See :func:`cross_entropy`.
        vocab_size: See :func:`cross_entropy`.
        smoothing: Probability that is moved from the label to the other entries.

    Returns:
        The sum of the smoothed losses, the sum of the plain cross-entropy, the number of targets,
        and the number of correct predictions.
    """
    counted = labels != IGNORE_INDEX
    safe_labels = jnp.where(counted, labels, 0)

    def losses_of(chunk: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return token_losses(chunk, ids, vocab_size, smoothing)

    if isinstance(logits, DeferredLogits):
        losses, plain_losses, predictions = map_logits(losses_of, (logits,), safe_labels)
    else:
        losses, plain_losses, predictions = losses_of(logits, safe_labels)
    total, plain_total = (jnp.where(counted, part, 0.0).sum() for part in (losses, plain_losses))
    return total, plain_total, counted.sum(), (counted & (predictions == safe_labels)).sum()


def token_losses(
    logits: jax.Array, labels: jax.Array, vocab_size: int | None, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the loss of each position.

    Args:
        logits: See :func:`cross_entropy`.
        labels: Target IDs, `(...)`, all of which are in the vocabulary.
        vocab_size: See :func:`cross_entropy`.
        smoothing: See :func:`smoothed_cross_entropy`.

    Returns:
        The smoothed loss, the plain cross-entropy (both float32) and the most probable ID of each
        position, `(...)`.
    """
    size = logits.shape[-1] if vocab_size is None else min(vocab_size, logits.shape[-1])
    if logits.shape[-1] > size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)
    return _label_losses(logits, labels, smoothing, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _label_losses(
    logits: jax.Array, labels: jax.Array, smoothing: float, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the smoothed loss, the plain cross-entropy and the most probable ID per position.

    The gradient with respect to the logits is implemented explicitly as the softmax minus the
    target distribution. Automatic differentiation would keep the softmax, and allocate a second
    array of the size of the logits. Only the first ``size`` columns belong to the vocabulary.
    """
    return _label_losses_forward(logits, labels, smoothing, size)[0]


def _label_losses_forward(logits: jax.Array, labels: jax.Array, smoothing: float, size: int) -> Any:
    chunk_rows = rows_per_chunk(logits)
    if chunk_rows == labels.size:
        losses, plain_losses, predictions, log_partition = _losses(logits, labels, smoothing, size)
    else:
        # The logits have the same shape as in the backward pass, so that XLA computes them once.
        flat = _bits(logits).reshape(-1, logits.shape[-1])

        def chunk_losses(chunk: tuple[jax.Array, jax.Array]) -> Any:
            start, ids = chunk
            rows = jax.lax.dynamic_slice_in_dim(flat, start, chunk_rows)
            return _losses(_floats(rows, logits.dtype), ids, smoothing, size)

        rows = jax.lax.map(
            chunk_losses, (jnp.arange(0, labels.size, chunk_rows), labels.reshape(-1, chunk_rows))
        )
        losses, plain_losses, predictions, log_partition = (
            leaf.reshape(labels.shape) for leaf in rows
        )
    return (losses, plain_losses, predictions), (logits, labels, log_partition)


def _losses(logits: jax.Array, labels: jax.Array, smoothing: float, size: int) -> Any:
    """Returns four values per position.

    These are the smoothed loss, the plain cross-entropy, the most probable ID, and the logarithm of
    the softmax denominator.
    """
    logits32 = logits.astype(jnp.float32)
    maximum = logits32.max(-1)
    log_partition = jnp.log(jnp.exp(logits32 - maximum[..., None]).sum(-1)) + maximum
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    plain_losses = losses = log_partition - label_logits
    if smoothing:
        smoothing_per_class = smoothing / (size - 1)
        # Sum the logits relative to their maximum, because sums of the logits are less precise.
        sum_of_losses = size * (log_partition - maximum) - _real(
            logits32 - maximum[..., None], size
        ).sum(-1)
        entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(
            smoothing_per_class
        )
        losses = (
            (1 - smoothing - smoothing_per_class) * plain_losses
            + smoothing_per_class * sum_of_losses
            - entropy
        )
    return losses, plain_losses, fast_argmax(logits32, maximum), log_partition


def _label_losses_backward(smoothing: float, size: int, saved: Any, cotangents: Any) -> Any:
    logits, labels, log_partition = saved
    smoothed, plain, _ = cotangents
    chunk_rows = rows_per_chunk(logits)
    if chunk_rows == labels.size:
        return _change(logits, labels, log_partition, smoothed, plain, smoothing, size), None
    shape = logits.shape
    columns = [leaf.reshape(-1) for leaf in (labels, log_partition, smoothed, plain)]

    def body(index: jax.Array, flat: jax.Array) -> jax.Array:
        start = index * chunk_rows
        logits_chunk, ids, sums, first, second = [
            jax.lax.dynamic_slice_in_dim(leaf, start, chunk_rows) for leaf in (flat, *columns)
        ]
        gradient = _change(
            _floats(logits_chunk, logits.dtype), ids, sums, first, second, smoothing, size
        )
        return jax.lax.dynamic_update_slice_in_dim(flat, _bits(gradient), start, 0)

    # The gradient overwrites the logits, so that only one array of this size exists.
    flat = jax.lax.fori_loop(
        0, labels.size // chunk_rows, body, _bits(logits).reshape(-1, shape[-1])
    )
    return _floats(flat, logits.dtype).reshape(shape), None


def _bits(x: jax.Array) -> jax.Array:
    """Views a bfloat16 array as integers. Other arrays are returned unchanged.

    XLA on CPU would convert a bfloat16 array to float32 in each iteration of a loop. The loss of
    1,024 x 50,257 logits would take 3.9 s of CPU time instead of 0.2 s.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _floats(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _change(
    logits: jax.Array,
    labels: jax.Array,
    log_partition: jax.Array,
    smoothed_cotangent: jax.Array,
    plain_cotangent: jax.Array,
    smoothing: float,
    size: int,
) -> jax.Array:
    """Returns the gradient of the logits, from the cotangents of the smoothed and plain losses."""
    smoothed_cotangent, plain_cotangent = smoothed_cotangent[..., None], plain_cotangent[..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_partition[..., None])
    if not smoothing:
        gradient = (probabilities - (ids == labels[..., None])) * (
            smoothed_cotangent + plain_cotangent
        )
        return gradient.astype(logits.dtype)
    smoothing_per_class = smoothing / (size - 1)
    label_term = jnp.where(
        ids == labels[..., None],
        (1 - smoothing - smoothing_per_class) * smoothed_cotangent + plain_cotangent,
        0.0,
    )
    gradient = (
        _real(
            probabilities * (smoothed_cotangent + plain_cotangent)
            - smoothing_per_class * smoothed_cotangent,
            size,
        )
        - label_term
    )
    return gradient.astype(logits.dtype)


_label_losses.defvjp(_label_losses_forward, _label_losses_backward)


def rows_per_chunk(logits: jax.Array) -> int:
    """Returns the number of positions of ``logits``, `(..., vocab_size)`, to process together.

    On a single CPU device, the positions are processed in chunks that fit in its caches, which
    takes half as long as processing all positions together (docs/benchmarks.md). On other devices,
    all positions are processed together.
    """
    rows = math.prod(logits.shape[:-1])
    if not is_single_cpu():
        return rows
    return largest_divisor(rows, CHUNK_LOGITS // logits.shape[-1]) if rows else 0


def _real(x: jax.Array, size: int) -> jax.Array:
    """Sets the columns from ``size`` on to 0.

    If there are no such columns, ``x`` is returned unchanged, because comparing the column numbers
    with ``size`` is slow on a CPU.
    """
    return x if x.shape[-1] == size else jnp.where(jnp.arange(x.shape[-1]) < size, x, 0.0)
