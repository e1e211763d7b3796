"""Log-probabilities of given tokens, computed without holding the logits of a whole batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hfseq.nn.logits import DeferredLogits, map_logits
from hfseq.objectives.cross_entropy import token_losses


class TokenStatistics(NamedTuple):
    """Statistics for each position, `(rows, length)`. Only `logps` passes a gradient.

    Attributes:
        logps: Log-probability of the target.
        entropy: Entropy of the predicted distribution in nats.
        mean_logits: Mean of the logits over the vocabulary.
        correct: Whether the target is the most probable token.
    """

    logps: jax.Array
    entropy: jax.Array
    mean_logits: jax.Array
    correct: jax.Array


def token_statistics(
    logits: jax.Array | DeferredLogits, targets: jax.Array, vocab_size: int
) -> TokenStatistics:
    """Returns statistics of the predictions of given tokens, in float32.

    Args:
        logits: Logits, `(rows, length, vocab_size)`. They may have additional padding columns.
        targets: Token IDs, `(rows, length)`.
        vocab_size: Size of the vocabulary.
    """

    def statistics(chunk: jax.Array, ids: jax.Array) -> TokenStatistics:
        _, losses, predictions = token_losses(chunk, ids, vocab_size)
        real = jax.lax.stop_gradient(chunk[..., :vocab_size]).astype(jnp.float32)
        probabilities = jax.nn.softmax(real)
        log_partition = jax.nn.logsumexp(real, axis=-1)
        # The expected logit is finite, because columns that only pad the vocabulary were removed.
        entropy = log_partition - (probabilities * real).sum(-1)
        return TokenStatistics(-losses, entropy, real.mean(-1), predictions == ids)

    return map_logits(statistics, (logits,), targets)


def segment_sums(values: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Sums the values of each segment of a row.

    Args:
        values: Numbers, `(rows, length)`.
        segments: Segment number of each position, from 1, or 0 for none, `(rows, length)`.
        count: Maximum number of segments per row.

    Returns:
        The sums in float32, `(rows, count)`.
    """
    inside = segments[:, :, None] == jnp.arange(1, count + 1)
    return jnp.where(inside, values.astype(jnp.float32)[:, :, None], 0.0).sum(1)
