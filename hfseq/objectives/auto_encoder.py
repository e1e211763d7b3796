"""The reconstruction losses of sparse autoencoders (CSR).

Wen et al., "Beyond Matryoshka: Revisiting Sparse Coding for Adaptive Representation", 2025. The
losses are those of sentence-transformers' CSRReconstructionLoss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hfseq.modeling.sentence.auto_encoder import SparseAutoEncoder

#: A latent feature counts as used if its value exceeds this threshold.
USED_ABOVE = 1e-5


def reconstruct(
    encoder: SparseAutoEncoder,
    vectors: jax.Array,
    weights: Any,
    last_nonzero: jax.Array,
    valid: jax.Array,
    *,
    auxiliary_weight: float = 0.1,
    train: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes latent features, the errors of the vectors that they describe, and statistics.

    The loss of a column of texts is the squared error of the vectors that the k largest features
    describe, an eighth of that of the 4 k largest, and an auxiliary loss: the features that have
    not been used for a long time describe the remaining error.

    Args:
        encoder: The settings of the autoencoder.
        vectors: Dense vectors, `(rows, texts, input_dim)`.
        weights: The weights of the autoencoder by name.
        last_nonzero: The statistics, integers `(hidden_dim,)`.
        valid: Mask of the rows that hold real examples (not padding), `(rows,)`.
        auxiliary_weight: Weight of the auxiliary loss.
        train: Whether to update the statistics.

    Returns:
        The k largest latent features of each text, `(rows, texts, hidden_dim)`. The mean loss of
        the columns, a scalar. The statistics after all columns.
    """
    latents, losses = [], []
    with jax.default_matmul_precision("highest"):
        for text in range(vectors.shape[1]):
            features, loss, last_nonzero = _reconstruct_column(
                encoder, vectors[:, text], weights, last_nonzero, valid, auxiliary_weight, train
            )
            latents.append(features)
            losses.append(loss)
    return jnp.stack(latents, 1), jnp.stack(losses).mean(), last_nonzero


def _reconstruct_column(
    encoder: SparseAutoEncoder,
    vectors: jax.Array,
    weights: Any,
    last_nonzero: jax.Array,
    valid: jax.Array,
    auxiliary_weight: float,
    train: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the latent features of a column of texts, its loss, and the new statistics."""
    vectors = vectors.astype(jnp.float32)
    standardized, mean, deviation = encoder.standardize(vectors)
    before_activation = encoder.encode(standardized, weights)

    def update(last_nonzero: jax.Array, features: jax.Array) -> jax.Array:
        used = ((features > USED_ABOVE) & valid[:, None]).any(0)
        return jnp.where(used, 0, last_nonzero) + 1 if train else last_nonzero

    features, more_features = keep_largest(before_activation, encoder.k, 4 * encoder.k)
    last_nonzero = update(last_nonzero, features)
    decoded = encoder.decode(features, weights) * deviation + mean
    decoded_more = encoder.decode(more_features, weights) * deviation + mean
    loss = mean_square(vectors - decoded, valid) + mean_square(vectors - decoded_more, valid) / 8
    if encoder.k_aux:
        is_unused = last_nonzero > encoder.dead_threshold
        (unused,) = keep_largest(before_activation * is_unused, encoder.k_aux)
        residual = vectors - jax.lax.stop_gradient(decoded - weights["pre_bias"] * deviation)
        error = mean_square(encoder.decode(unused, weights) * deviation - residual, valid)
        loss += auxiliary_weight * error / spread(residual, valid)
    return features, loss, update(last_nonzero, more_features)


def keep_largest(values: jax.Array, *counts: int) -> list[jax.Array]:
    """Sets all values of a row to 0, except the positive ones among the largest.

    Args:
        values: `(rows, features)`.
        *counts: Numbers of values per row.

    Returns:
        For each count, an array `(rows, features)` with this number of values per row.
    """
    largest, indices = jax.lax.top_k(values, max(counts))
    largest, rows = jax.nn.relu(largest), jnp.arange(len(values))[:, None]
    zeros = jnp.zeros_like(values)
    return [zeros.at[rows, indices[:, :n]].set(largest[:, :n]) for n in counts]


def mean_square(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the mean of the squared values of the valid rows, `(rows, features)`."""
    squares = jnp.where(valid[:, None], jnp.square(values), 0.0).sum()
    return squares / (jnp.maximum(valid.sum(), 1) * values.shape[1])


def spread(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the mean squared distance to the mean row, or 1 if all valid rows are equal."""
    mean = jnp.where(valid[:, None], values, 0.0).sum(0) / jnp.maximum(valid.sum(), 1)
    variance = mean_square(values - mean, valid)
    first = values[jnp.argmax(valid)]
    is_constant = jnp.where(valid[:, None], values == first, True).all() | (variance == 0)
    return jnp.where(is_constant, 1.0, variance)
