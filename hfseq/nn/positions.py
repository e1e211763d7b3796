"""Positions: where tokens stand, and which of them a head looks at."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def positions_after_padding(input_ids: jax.Array, pad_token_id: int) -> jax.Array:
    """Number the tokens that are not padding from ``pad_token_id + 1`` (RoBERTa's rule)."""
    real = (input_ids != pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=-1) * real + pad_token_id


def gather_positions(hidden_states: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Pick the hidden states that a head needs; ``None`` keeps all.

    ``hidden_states`` is (batch, length, features), ``positions`` (groups, k) indices into the
    flattened rows of each of ``groups`` equal parts of the batch; the result is (groups, k,
    features). One group a data shard keeps the gather on its own device.
    """
    if positions is None:
        return hidden_states
    grouped = hidden_states.reshape(positions.shape[0], -1, hidden_states.shape[-1])
    return jnp.take_along_axis(grouped, positions[..., None], axis=1)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """Number the tokens of every document from 0; ``segment_ids`` is (batch, length)."""
    places = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
