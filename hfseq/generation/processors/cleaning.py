"""Processors that repair or normalise scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hfseq.generation.processors.base import FlaxLogitsProcessor


class FlaxInfNanRemoveLogitsProcessor(FlaxLogitsProcessor):
    """Replaces NaN by 0 and infinities by the largest finite numbers."""

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Return finite scores."""
        return jnp.nan_to_num(scores)


class FlaxLogitNormalization(FlaxLogitsProcessor):
    """Turns scores into log-probabilities."""

    def __call__(self, input_ids: Any, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Return the log-softmax."""
        return jax.nn.log_softmax(scores, axis=-1)
