"""Falcon-Mamba (Zuo et al., 2024) on Flax NNX: Mamba (Gu and Dao, 2023) with additional norms.

Each channel has a state vector, and each element of this vector has its own decay. The time steps
and the factors with which tokens write to and read from the state are normalized without weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from transformers import FalconMambaConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import FixedStateGeneration
from hfseq.nn.layers import Initializer
from hfseq_plugins.mamba2 import modeling as mamba2
from hfseq_plugins.mamba2.modeling import (
    FlaxMambaPreTrainedModel,
    StateMixer,
    in_chunks,
    time_step_bias,
)

#: Number of tokens whose states are computed in parallel.
CHUNK_SIZE = 32


def time_step_weights(config: FalconMambaConfig) -> Initializer:
    """Returns the initializer of the time step projection.

    Raises:
        UsageError: The configured `time_step_init_scheme` is unknown.
    """
    bound = config.time_step_rank**-0.5 * config.time_step_scale  # type: ignore[operator]  # a number after the initialization
    if config.time_step_init_scheme == "constant":
        return initializers.constant(bound)
    if config.time_step_init_scheme == "random":
        return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
            key, shape, dtype, -bound, bound
        )
    raise UsageError(
        f"unknown time_step_init_scheme '{config.time_step_init_scheme}' in the configuration "
        "(known: constant, random)"
    )


class Mixer(StateMixer):
    """State space layer with one state vector per channel."""

    def __init__(self, config: FalconMambaConfig, rngs: nnx.Rngs):
        super().__init__()
        self.inner, self.state_size = config.intermediate_size, config.state_size
        self.rank, self.epsilon = config.time_step_rank, config.mixer_rms_eps
        self.state_shape, init = (self.inner, self.state_size), nn.normal(config.initializer_range)
        self.in_proj = nn.Linear(
            config.hidden_size, 2 * self.inner, init, rngs, use_bias=config.use_bias
        )
        self.add_convolution(config, self.inner, rngs)
        features = self.rank + 2 * self.state_size  # type: ignore[operator]  # a number after the initialization
        self.x_proj = nn.Linear(self.inner, features, init, rngs, use_bias=False)
        self.dt_proj = nn.Linear(
            self.rank,  # type: ignore[arg-type]  # a number after the initialization
            self.inner,
            time_step_weights(config),
            rngs,
            bias_init=time_step_bias(config),
        )
        rates = jnp.log(jnp.arange(1, self.state_size + 1, dtype=jnp.float32))
        self.A_log = nnx.Param(jnp.broadcast_to(rates, self.state_shape))
        self.D = nnx.Param(jnp.ones(self.inner))
        self.add_output(config, self.inner, rngs)

    def split(self, projected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Splits the output of `in_proj` into gate and input of the convolution.

        The third result is `None`, because `scan` computes the time steps itself.
        """
        inputs, gate = jnp.split(projected, 2, axis=-1)
        return gate, inputs, None

    def normalize(self, x: jax.Array) -> jax.Array:
        """Divides the last axis by its root mean square."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.epsilon)
        return y.astype(x.dtype)

    def scan(
        self,
        states: jax.Array,  # (batch, length, inner)
        time_steps: jax.Array | None,
        real: jax.Array | None,  # (batch, length)
        start: jax.Array,  # (batch, inner, state_size)
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the recurrence.

        Returns:
            The output, float32 `(batch, length, inner)`, and the last state.
        """
        ends = (self.rank, self.rank + self.state_size)  # type: ignore[operator]  # a number after the initialization
        parts = jnp.split(self.x_proj(states), ends, axis=-1)  # type: ignore[arg-type]  # numbers
        steps, keys, queries = map(self.normalize, parts)
        steps = jax.nn.softplus(self.dt_proj(steps).astype(jnp.float32))
        if real is not None:
            steps = steps * real[..., None]
        values, length = states.astype(jnp.float32), states.shape[1]
        rates = -jnp.exp(self.A_log[...].astype(jnp.float32))
        size = min(CHUNK_SIZE, length)

        def combine(
            left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return left[0] * right[0], right[0] * left[1] + right[1]

        def run_chunk(
            state: jax.Array, chunk: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, jax.Array]:
            values, keys, queries, steps = chunk  # (batch, size, ...)
            decay = jnp.exp(steps[..., None] * rates)  # (batch, size, inner, state_size)
            added = (steps * values)[..., None] * keys[:, :, None]
            decay, added = jax.lax.associative_scan(combine, (decay, added), axis=1)
            all_states = decay * state[:, None] + added
            return all_states[:, -1], jnp.einsum("blcn,bln->blc", all_states, queries)

        chunks = tuple(
            in_chunks(part.astype(jnp.float32), size) for part in (values, keys, queries, steps)
        )
        # The backward pass recomputes the (batch, size, inner, state_size) arrays of a chunk.
        state, y = jax.lax.scan(jax.checkpoint(run_chunk), start, chunks)
        y = y.swapaxes(0, 1).reshape(len(states), -1, self.inner)[:, :length]
        return y + values * self.D[...], state


class Block(mamba2.Block):
    """Pre-norm layer."""

    mixer_class = Mixer


class Backbone(mamba2.Backbone):
    """Decoder without a head."""

    block_class = Block


class CausalLM(mamba2.CausalLM):
    """Causal language model. A tied head reuses the word embeddings."""

    backbone_class = Backbone


class FlaxFalconMambaModel(FlaxMambaPreTrainedModel):
    """Falcon-Mamba without a head. Returns hidden states."""

    config_class, module_class = FalconMambaConfig, Backbone


class FlaxFalconMambaForCausalLM(FixedStateGeneration, FlaxMambaPreTrainedModel):
    """Falcon-Mamba with a language modeling head."""

    config_class, module_class = FalconMambaConfig, CausalLM
