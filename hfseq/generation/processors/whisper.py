"""The timestamp rules of Whisper (Radford et al., 2022)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hfseq.generation.processors.base import FlaxLogitsProcessor


class FlaxWhisperTimeStampLogitsProcessor(FlaxLogitsProcessor):
    """Lets timestamps come in pairs, first at the beginning, and when they are more probable."""

    def __init__(self, generate_config: Any, model_config: Any, decoder_input_length: int):
        self.eos_token_id = generate_config.eos_token_id
        self.no_timestamps_token_id = generate_config.no_timestamps_token_id
        self.timestamp_begin = generate_config.no_timestamps_token_id + 1
        self.begin_index = decoder_input_length + 1
        if generate_config.is_multilingual:
            self.begin_index += 2  # language and task
        limit = getattr(generate_config, "max_initial_timestamp_index", None)
        self.max_initial_timestamp_index = model_config.vocab_size if limit is None else limit

    def __call__(self, input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
        """Forbid what breaks the rules."""
        tokens = jnp.arange(scores.shape[-1])[None]
        stamp = tokens >= self.timestamp_begin
        scores = jnp.where(tokens == self.no_timestamps_token_id, -jnp.inf, scores)
        last, before = (self._was_stamp(input_ids, cur_len, back) for back in (1, 2))
        new = cur_len - self.begin_index
        closed = (new >= 1) & last & ((new < 2) | before)
        opened = (new >= 1) & last & ~((new < 2) | before)
        scores = jnp.where(closed[:, None] & stamp, -jnp.inf, scores)
        scores = jnp.where(opened[:, None] & (tokens < self.eos_token_id), -jnp.inf, scores)
        late = tokens > self.timestamp_begin + self.max_initial_timestamp_index
        scores = jnp.where((cur_len == self.begin_index) & late, -jnp.inf, scores)
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        stamps = jax.nn.logsumexp(
            jnp.where(stamp, log_probabilities, -jnp.inf), axis=-1, keepdims=True
        )
        text = jnp.where(stamp, -jnp.inf, log_probabilities).max(-1, keepdims=True)
        return jnp.where((stamps > text) & ~stamp, -jnp.inf, scores)

    def _was_stamp(self, input_ids: jax.Array, cur_len: Any, back: int) -> jax.Array:
        place = jnp.maximum(cur_len - back, 0)
        column = jax.lax.dynamic_slice_in_dim(input_ids, place, 1, axis=1)
        return column[:, 0] >= self.timestamp_begin
