"""Mamba-2 (Dao and Gu, 2024) on Flax NNX. Module attributes are named as in checkpoints.

A layer has no attention. Its cache has a fixed size. It contains the last inputs of a convolution,
and one matrix per head, the *state*. Each token scales the state and adds an outer product to it.
Masked tokens, at any position of a row, do not change the cache.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from transformers import Mamba2Config, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import FixedStateGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.layers import Initializer

RULES = [
    (r"embeddings/embedding$", "embedding"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"(in|out|x|dt)_proj/kernel$", "row_table"),
    (r".*", "replicated"),
]


def time_step_bias(config: PreTrainedConfig) -> Initializer:
    """Returns the initializer of the time step bias.

    A bias is the inverse softplus of a time step. The time steps are drawn from a log-uniform
    distribution between `time_step_min` and `time_step_max`.
    """

    def init(key: jax.Array, shape: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
        steps = jnp.maximum(steps, config.time_step_floor)
        return steps + jnp.log(-jnp.expm1(-steps))

    return init


class StateMixer(nn.StateAttention):
    """Base class of selective state space layers: projections, convolution and cache.

    Subclasses create `in_proj`, `conv1d` and `out_proj`, and define the recurrence.

    Attributes:
        state_shape: Shape of the state of one row. Set by subclasses.
        channels: Number of channels of the convolution. Set by subclasses.
    """

    entries = ("window", "state", "position")
    state_shape: tuple[int, ...]
    channels: int
    in_proj: nn.Linear
    out_proj: nn.Linear

    def add_convolution(self, config: PreTrainedConfig, channels: int, rngs: nnx.Rngs) -> None:
        """Creates the causal convolution. It has one filter per channel."""
        self.taps, self.channels = config.conv_kernel, channels
        self.conv1d = nn.Conv(
            channels,
            channels,
            (self.taps,),
            nn.uniform(self.taps),
            rngs,
            groups=channels,
            use_bias=config.use_conv_bias,
        )
        self.act = nn.activation(config.hidden_act)

    def add_output(self, config: PreTrainedConfig, inner: int, rngs: nnx.Rngs) -> None:
        """Creates the output projection."""
        scale = config.num_hidden_layers if config.rescale_prenorm_residual else 1
        init, bias = nn.uniform(inner * scale), config.use_bias
        self.out_proj = nn.Linear(inner, config.hidden_size, init, rngs, use_bias=bias)

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Returns the cache of rows without tokens. The state is always float32."""
        return {
            "window": jnp.zeros((batch_size, self.taps - 1, self.channels), dtype),
            "state": jnp.zeros((batch_size, *self.state_shape), jnp.float32),
            "position": jnp.zeros(batch_size, jnp.int32),
        }

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: jax.Array | None,  # (batch, length)
        reset_rows: jax.Array | None,  # (batch,)
    ) -> jax.Array:
        start = self.read_cache() or self.empty_cache(len(x), x.dtype)
        if reset_rows is not None:
            keep = ~reset_rows

            def empty(entry: jax.Array) -> jax.Array:
                return entry * keep.reshape(-1, *(1 for _ in entry.shape[1:])).astype(entry.dtype)

            start = jax.tree.map(empty, start)
        projected = self.in_proj(x)
        if mask is None:
            y = self.process(projected, None, start)
        else:
            # Move the masked tokens to the end of each row, so that the other tokens are adjacent.
            order = jnp.argsort(mask == 0, axis=1, stable=True)[..., None]
            projected = jnp.take_along_axis(projected, order, 1)
            real = jnp.take_along_axis((mask != 0).astype(projected.dtype), order[..., 0], 1)
            y = self.process(projected * real[..., None], real, start)
            y = jnp.take_along_axis(y, jnp.argsort(order, 1), 1)
        return self.out_proj(y.astype(x.dtype))

    def process(
        self,
        projected: jax.Array,  # (batch, length, features)
        real: jax.Array | None,  # (batch, length), 1 for tokens and then 0 for masked tokens
        start: dict[str, jax.Array],
    ) -> jax.Array:
        """Runs the convolution and the recurrence, updates the cache, and applies the gate.

        Returns:
            The input of the output projection, `(batch, length, inner)`.
        """
        gate, inputs, time_steps = self.split(projected)
        window = start["window"].astype(inputs.dtype)
        sequence = jnp.concatenate([window, inputs], 1)
        states = self.act(self.conv1d(sequence))
        if real is not None:
            states = states * real[..., None]
        y, state = self.scan(states, time_steps, real, start["state"])
        count = jnp.full(len(inputs), inputs.shape[1]) if real is None else real.sum(1)
        count = count.astype(jnp.int32)
        columns = count[:, None] + jnp.arange(self.taps - 1)
        self.write_cache(
            {
                "window": jnp.take_along_axis(sequence, columns[..., None], 1),
                "state": state,
                "position": start["position"] + count,
            }
        )
        return self.apply_gate(y, gate)

    def split(self, projected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Splits the output of `in_proj` into gate, input of the convolution, and time steps."""
        raise NotImplementedError

    def scan(
        self,
        states: jax.Array,  # (batch, length, channels)
        time_steps: jax.Array | None,  # (batch, length, features)
        real: jax.Array | None,  # (batch, length)
        start: jax.Array,  # (batch, *state_shape)
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the recurrence.

        Returns:
            The output, float32 `(batch, length, inner)`, and the last state.
        """
        raise NotImplementedError

    def apply_gate(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """Multiplies the output of the recurrence by the gate, `(batch, length, inner)` each."""
        return y * jax.nn.silu(gate.astype(jnp.float32))


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """Splits the length of an array into chunks, and pads the last chunk with zeros.

    Args:
        x: The array, `(batch, length, ...)`.
        size: Length of a chunk.

    Returns:
        The chunks, `(chunks, batch, size, ...)`.
    """
    padding = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
    return x.reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)


class Mixer(StateMixer):
    """State space layer with a matrix per head, which decays by one factor per head and token.

    As in section 6 of the paper, the sequence is split into chunks. The tokens of a chunk are
    processed together, with matrix products like those of attention.
    """

    def __init__(self, config: Mamba2Config, rngs: nnx.Rngs):
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.groups, self.state_size = config.n_groups, config.state_size
        if self.heads % self.groups:
            raise UsageError(
                f"num_heads={self.heads} in the configuration must be a multiple of "
                f"n_groups={self.groups}"
            )
        self.inner = self.heads * self.head_dim
        self.state_shape = (self.heads, self.head_dim, self.state_size)
        self.limits = tuple(map(float, config.time_step_limit))
        self.chunk_size = config.chunk_size
        channels = self.inner + 2 * self.groups * self.state_size
        features, init = self.inner + channels + self.heads, nn.normal(config.initializer_range)
        self.in_proj = nn.Linear(config.hidden_size, features, init, rngs, use_bias=config.use_bias)
        self.add_convolution(config, channels, rngs)
        self.dt_bias = nnx.Param(time_step_bias(config)(rngs.params(), (self.heads,)))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, self.heads + 1, dtype=jnp.float32)))
        self.D = nnx.Param(jnp.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner, config.layer_norm_epsilon, leaf="weight")
        self.add_output(config, self.inner, rngs)

    def split(self, projected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Splits the output of `in_proj` into gate, input of the convolution, and time steps."""
        gate, inputs, steps = jnp.split(
            projected, (self.inner, self.inner + self.channels), axis=-1
        )
        return gate, inputs, steps

    def scan(
        self,
        states: jax.Array,  # (batch, length, channels)
        time_steps: jax.Array | None,  # (batch, length, heads)
        real: jax.Array | None,  # (batch, length)
        start: jax.Array,  # (batch, heads, head_dim, state_size)
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the recurrence.

        Returns:
            The output, float32 `(batch, length, inner)`, and the last state.
        """
        assert time_steps is not None
        length = states.shape[1]
        steps = jax.nn.softplus(time_steps.astype(jnp.float32) + self.dt_bias[...])
        steps = jnp.clip(steps, *self.limits)
        if real is not None:
            steps = steps * real[..., None]
        size = min(self.chunk_size, length)
        group_features = self.groups * self.state_size
        values, keys, queries = jnp.split(
            states.astype(jnp.float32), (self.inner, self.inner + group_features), axis=-1
        )
        heads = self.heads // self.groups  # per group
        values = values.reshape(*values.shape[:2], self.groups, heads, self.head_dim)
        keys, queries = (
            part.reshape(*part.shape[:2], self.groups, self.state_size) for part in (keys, queries)
        )
        steps = steps.reshape(*steps.shape[:2], self.groups, heads)
        rates = -jnp.exp(self.A_log[...].astype(jnp.float32)).reshape(self.groups, heads)
        earlier = jnp.tril(jnp.ones((size, size), bool))[..., None, None]

        def run_chunk(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
            values, keys, queries, steps = chunk  # (batch, size, groups, ...)
            decay = jnp.cumsum(steps * rates, axis=1)  # logarithm, since the start of the chunk
            between = decay[:, :, None] - decay[:, None]  # (batch, size, size, groups, heads)
            between = jnp.exp(jnp.where(earlier, between, -jnp.inf))
            scores = jnp.einsum("bign,bjgn->bijg", queries, keys)[..., None] * between
            added = values * steps[..., None]
            y = jnp.einsum("bijgh,bjghp->bighp", scores, added)
            y += jnp.einsum("bign,bghpn->bighp", queries, state) * jnp.exp(decay)[..., None]
            left = jnp.exp(decay[:, -1:] - decay)  # from each token to the end of the chunk
            state = state * jnp.exp(decay[:, -1])[..., None, None] + jnp.einsum(
                "bjgn,bjghp->bghpn", keys, added * left[..., None]
            )
            return state, y

        chunks = tuple(in_chunks(part, size) for part in (values, keys, queries, steps))
        state = start.reshape(-1, self.groups, heads, self.head_dim, self.state_size)
        # The backward pass recomputes the (batch, size, size, heads) arrays of a chunk.
        state, y = jax.lax.scan(jax.checkpoint(run_chunk), state, chunks)
        y = y.swapaxes(0, 1).reshape(len(states), -1, self.groups, heads, self.head_dim)
        y = y[:, :length] + values * self.D[...].reshape(self.groups, heads, 1)
        return y.reshape(len(states), length, -1), state.reshape(-1, *self.state_shape)

    def apply_gate(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """Applies the gate, then RMSNorm to each group of channels."""
        y = super().apply_gate(y, gate)
        grouped = y.reshape(*y.shape[:-1], self.groups, -1)
        variance = jnp.square(grouped).mean(-1, keepdims=True)
        grouped = grouped * jax.lax.rsqrt(variance + self.norm.epsilon)
        return grouped.reshape(y.shape) * self.norm.weight[...]  # type: ignore[attr-defined]  # its parameter


class Block(nnx.Module):
    """Pre-norm layer.

    Attributes:
        mixer_class: Class of the state space layer.
    """

    mixer_class: ClassVar[Any] = Mixer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon, leaf="weight")
        self.mixer = self.mixer_class(config, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: jax.Array | None,  # (batch, length)
        reset_rows: jax.Array | None,  # (batch,)
        *,
        rngs: Keys | None = None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, None]:
        return x + self.mixer(self.norm(x), mask, reset_rows).astype(x.dtype), None


class Backbone(nnx.Module):
    """Decoder without a head.

    Attributes:
        block_class: Class of the layers.
    """

    block_class: ClassVar[Any] = Block

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        init = nn.normal(config.initializer_range)
        self.embeddings = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.layers = nn.Layers(
            [self.block_class(config, rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm_f = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon, leaf="weight")
        self.residual_in_fp32 = config.residual_in_fp32

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        reset_rows: jax.Array | None = None,  # (batch,)
        *,
        rngs: Keys | None = None,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x = self.embeddings(input_ids)
        x, _, inputs = nn.run_layers(
            self.layers,
            x.astype(jnp.float32) if self.residual_in_fp32 else x,
            attention_mask,
            reset_rows,
            rngs=rngs,
            collect=output_hidden_states,
        )
        normed = self.norm_f(x)
        # As in PyTorch: the output of each layer, and the output of the final norm.
        states = None if inputs is None else (*inputs[1:], x, normed)
        return out.FlaxBaseModelOutputWithPast(last_hidden_state=normed, hidden_states=states)


class CausalLM(nnx.Module):
    """Causal language model. A tied head reuses the word embeddings.

    Attributes:
        backbone_class: Class of the decoder.
    """

    backbone_class: ClassVar[Any] = Backbone

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.backbone = self.backbone_class(config, rngs)
        sizes, init = (config.hidden_size, config.vocab_size), nn.normal(config.initializer_range)
        self.lm_head = (
            nnx.data(None)
            if config.tie_word_embeddings
            else nn.Linear(*sizes, init, rngs, use_bias=False)
        )

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        reset_rows: jax.Array | None = None,  # (batch,)
        *,
        rngs: Keys | None = None,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        output = self.backbone(
            input_ids,
            attention_mask,
            reset_rows,
            rngs=rngs,
            output_hidden_states=output_hidden_states,
        )
        head = self.backbone.embeddings.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithPast(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
        )


class FlaxMambaPreTrainedModel(FlaxPreTrainedModel):
    """Base class of Mamba models, with their call signature and checkpoint names."""

    base_model_prefix = "backbone"
    fixed_state = True
    head_counts = ()
    weight_aliases = {"lm_head.weight": "backbone.embeddings.weight"}
    weight_synonyms = {"backbone.embedding": "backbone.embeddings"}

    def __call__(  # type: ignore[override]  # without positions and attention weights
        self,
        input_ids: Input,
        attention_mask: Input = None,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        reset_rows: Input = None,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model. `FlaxPreTrainedModel.run` describes the other arguments.

        `input_ids` and `attention_mask` are `(batch, length)` and contain only the new tokens if a
        cache is passed. `reset_rows`, `(batch,)`, is true for rows whose cache is emptied before
        the first of these tokens.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "reset_rows": reset_rows,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            False,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxMamba2Model(FlaxMambaPreTrainedModel):
    """Mamba-2 without a head. Returns hidden states."""

    config_class, module_class = Mamba2Config, Backbone


class FlaxMamba2ForCausalLM(FixedStateGeneration, FlaxMambaPreTrainedModel):
    """Mamba-2 with a language modeling head."""

    config_class, module_class = Mamba2Config, CausalLM
