"""Rows without their padding: real tokens move to the front, results move back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Where the real tokens of a batch are.

    ``lengths`` (B,) counts them, None if all are real; ``order`` (B, T) lists their columns, and
    then the others', None if they are at the front; ``back`` (B, T) is where each column went.
    """

    lengths: jax.Array | None = None
    order: jax.Array | None = None
    back: jax.Array | None = None

    def pack(self, x: jax.Array | None) -> jax.Array | None:
        """Move the real tokens of (B, T) to the front."""
        if x is None or self.order is None:
            return x
        return jnp.take_along_axis(x, self.order, axis=1, mode="clip")

    def unpack(self, x: jax.Array) -> jax.Array:
        """Move the vectors of (B, T, F) back to the columns of their tokens."""
        if self.back is None:
            return x
        return jnp.take_along_axis(x, self.back[..., None], axis=1, mode="clip")

    def valid(self, tokens: int) -> jax.Array | None:
        """Tell which columns hold a real token once they are packed, (B, T)."""
        return None if self.lengths is None else jnp.arange(tokens) < self.lengths[:, None]


def find_rows(attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> Rows:
    """Find the real tokens by ``attention_mask`` (B, T); tokens of packed rows stay in place.

    What ``segment_ids`` (B, T) separate needs no order, and moving it would cost time in training.
    """
    if attention_mask is None or segment_ids is not None:
        return Rows()
    real = (attention_mask > 0).astype(jnp.int32)
    lengths = real.sum(1)
    if real.shape[1] == 1:
        return Rows(lengths)
    order = jnp.argsort(1 - real, axis=1, stable=True)
    return Rows(lengths, order, jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0))


def real_in_segments(segment_ids: jax.Array, attention_mask: jax.Array | None) -> jax.Array:
    """Tell which tokens of packed rows are real, (B, T): in a document, and not hidden."""
    real = segment_ids > 0
    return real if attention_mask is None else real & (attention_mask > 0)
