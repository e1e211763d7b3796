"""Mamba-2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060) in one file for hfseq.

The cache of a layer has a fixed size. It contains the last inputs of the convolution and one matrix
per head. The layers process the tokens one by one. Masked tokens do not change the cache.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import Mamba2Config

from hfseq import hookimpl, nn
from hfseq.generation import FixedStateGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out


class CausalConv(nnx.Module):
    """The parameters of a convolution over the tokens that has one filter per channel."""

    def __init__(self, config, channels, rngs):
        shape = (config.conv_kernel, 1, channels)  # PyTorch: (channels, 1, taps)
        self.kernel = nnx.Param(nn.uniform(config.conv_kernel)(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(channels)) if config.use_conv_bias else nnx.data(None)


class Mixer(nn.StateAttention):
    """A selective state space layer: a convolution, then a recurrence with one matrix per head."""

    entries = ("window", "state", "position")

    def __init__(self, config, rngs):
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.groups, self.state_size = config.n_groups, config.state_size
        self.limits, self.taps = tuple(config.time_step_limit), config.conv_kernel
        self.inner = config.num_heads * config.head_dim
        self.channels = self.inner + 2 * self.groups * self.state_size
        width, bias = config.hidden_size, config.use_bias
        init = nn.normal(config.initializer_range)
        projected = self.inner + self.channels + self.heads
        self.in_proj = nn.Linear(width, projected, init, rngs, use_bias=bias)
        self.conv1d = CausalConv(config, self.channels, rngs)
        # Draw log-uniform time steps between the limits. `dt_bias` is their inverse softplus.
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        step = jnp.exp(jax.random.uniform(rngs.params(), (self.heads,), minval=low, maxval=high))
        step = jnp.maximum(step, config.time_step_floor)
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, self.heads + 1, dtype=jnp.float32)))
        self.D = nnx.Param(jnp.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner, config.layer_norm_epsilon, leaf="weight")
        scale = math.sqrt(config.num_hidden_layers) if config.rescale_prenorm_residual else 1
        self.out_proj = nn.Linear(
            self.inner, width, nn.uniform(self.inner * scale**2), rngs, use_bias=bias
        )
        self.act = nn.activation(config.hidden_act)

    def empty_cache(self, batch_size, dtype):
        state = (batch_size, self.heads, self.head_dim, self.state_size)
        return {
            "window": jnp.zeros((batch_size, self.taps - 1, self.channels), dtype),
            "state": jnp.zeros(state, jnp.float32),
            "position": jnp.zeros(batch_size, jnp.int32),
        }

    def __call__(self, x, mask, keep):  # (batch, length, hidden), (batch, length), (batch,)
        # Rows where `keep` is False start with an empty state.
        cache = self.read_cache() or self.empty_cache(len(x), x.dtype)
        start = jax.tree.map(
            lambda a: a * keep.reshape(-1, *(1,) * (a.ndim - 1)).astype(a.dtype), cache
        )
        sizes = (self.inner, self.inner + self.channels)
        gate, inputs, steps = jnp.split(
            self.in_proj(x * mask[..., None].astype(x.dtype)), sizes, -1
        )
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.dt_bias[...])
        steps = jnp.clip(steps, *self.limits)
        decay = jnp.exp(-steps * jnp.exp(self.A_log[...].astype(jnp.float32)))
        kernel = self.conv1d.kernel[...][:, 0].astype(x.dtype)  # (taps, channels)
        bias = 0 if self.conv1d.bias is None else self.conv1d.bias[...].astype(x.dtype)

        def read_token(carry, token):
            window, state = carry  # (batch, taps - 1, channels), (batch, heads, head_dim, state)
            new_input, step, decay, is_real = token
            window_now = jnp.concatenate([window, new_input[:, None]], 1)
            mixed = self.act((window_now * kernel).sum(1) + bias)
            split = (self.inner, self.inner + self.groups * self.state_size)
            value, key, query = jnp.split(mixed.astype(jnp.float32), split, -1)
            value = value.reshape(-1, self.heads, self.head_dim)
            per_head = self.heads // self.groups
            key, query = (
                jnp.repeat(part.reshape(-1, self.groups, self.state_size), per_head, 1)
                for part in (key, query)
            )
            added = jnp.einsum("bh,bhd,bhs->bhds", step, value, key)
            state_now = state * decay[..., None, None] + added
            y = jnp.einsum("bhds,bhs->bhd", state_now, query) + value * self.D[...][:, None]
            real = is_real[:, None, None] > 0
            window = jnp.where(real, window_now[:, 1:], window)
            state = jnp.where(real[..., None], state_now, state)
            return (window, state), y.reshape(-1, self.inner)

        tokens = [part.swapaxes(0, 1) for part in (inputs, steps, decay, mask)]
        carry = (start["window"].astype(x.dtype), start["state"])
        (window, state), y = jax.lax.scan(read_token, carry, tokens)
        self.write_cache(
            {"window": window, "state": state, "position": start["position"] + mask.sum(1)}
        )
        y = y.swapaxes(0, 1) * jax.nn.silu(gate.astype(jnp.float32))
        return self.out_proj(self.gated_norm(y).astype(x.dtype))

    def gated_norm(self, y):  # (batch, length, inner)
        """Applies RMSNorm to each group of channels. Each channel has its own weight."""
        grouped = y.reshape(*y.shape[:-1], self.groups, -1)
        variance = jnp.square(grouped).mean(-1, keepdims=True)
        grouped = grouped * jax.lax.rsqrt(variance + self.norm.epsilon)
        return grouped.reshape(y.shape) * self.norm.weight[...]


class Block(nnx.Module):
    def __init__(self, config, rngs):
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon, leaf="weight")
        self.mixer = Mixer(config, rngs)

    def __call__(self, x, mask, keep, *, rngs=None):  # (batch, length, hidden), (batch, length)
        return x + self.mixer(self.norm(x), mask, keep), None


class Backbone(nnx.Module):
    def __init__(self, config, rngs):
        init = nn.normal(config.initializer_range)
        self.embeddings = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.layers = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm_f = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon, leaf="weight")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        reset_rows=None,
        *,
        rngs=None,
        output_hidden_states=False,
    ):  # (batch, length) twice, (batch,)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        keep = jnp.ones(len(input_ids), bool) if reset_rows is None else ~reset_rows
        x = self.embeddings(input_ids)
        x, _, inputs = nn.run_layers(
            self.layers, x, mask, keep, rngs=rngs, collect=output_hidden_states
        )
        x = self.norm_f(x)
        states = None if inputs is None else (*inputs, x)
        return out.FlaxBaseModelOutputWithPast(last_hidden_state=x, hidden_states=states)


class CausalLM(nnx.Module):
    def __init__(self, config, rngs):
        self.backbone = Backbone(config, rngs)
        sizes = (config.hidden_size, config.vocab_size)
        self.lm_head = nn.Linear(*sizes, nn.normal(config.initializer_range), rngs, use_bias=False)
        self.tied = config.tie_word_embeddings
        if self.tied:
            self.lm_head = nnx.data(None)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        reset_rows=None,
        *,
        rngs=None,
        output_hidden_states=False,
    ):  # (batch, length) twice, (batch,)
        states = {"rngs": rngs, "output_hidden_states": output_hidden_states}
        output = self.backbone(input_ids, attention_mask, reset_rows, **states)
        x = output.last_hidden_state
        logits = self.backbone.embeddings.attend(x) if self.tied else self.lm_head(x)
        return out.FlaxCausalLMOutputWithPast(logits=logits, hidden_states=output.hidden_states)


class FlaxMamba2PreTrainedModel(FlaxPreTrainedModel):
    config_class, base_model_prefix, fixed_state = Mamba2Config, "backbone", True
    weight_aliases = {"lm_head.weight": "backbone.embeddings.weight"}

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        params=None,
        past_key_values=None,
        dropout_rng=None,
        train=False,
        output_hidden_states=None,
        return_dict=None,
        *,
        reset_rows=None,
        extra=None,
    ):
        """Runs the model, which has no position IDs.

        With a cache, `attention_mask` contains the new tokens only. With `--update_length`,
        training passes `reset_rows`, bool `(batch,)`: True for rows that start with an empty state.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "reset_rows": reset_rows,
        }
        options = (False, output_hidden_states, return_dict, past_key_values, extra)
        return self.run(inputs, params, dropout_rng, train, *options)


class FlaxMamba2Model(FlaxMamba2PreTrainedModel):
    module_class = Backbone


class FlaxMamba2ForCausalLM(FixedStateGeneration, FlaxMamba2PreTrainedModel):
    module_class = CausalLM


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxMamba2Model, "ForCausalLM": FlaxMamba2ForCausalLM}
    rules = [
        (r"embeddings/embedding$|lm_head/kernel$", "table"),
        (r"(in|out)_proj/kernel$", "row_table"),
        (r".*", "replicated"),
    ]
    card = "A causal decoder with a recurrent state (Dao and Gu, 2024)."
    register("mamba2", config=Mamba2Config, heads=heads, sharding=rules, card=card)
