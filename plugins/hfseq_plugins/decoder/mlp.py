"""Dense feed-forward blocks of decoders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq_plugins.decoder.options import family_options, is_enabled


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """Returns a linear layer whose initial weights have the configured standard deviation."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=bias)


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer, 2020).

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        inner: Number of inner features. The default is `intermediate_size` of the configuration.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, inner: int | None = None):
        width, inner = config.hidden_size, inner or config.intermediate_size
        bias = is_enabled(config, family_options(config).mlp_bias)
        self.gate_proj = linear(config, width, inner, rngs, bias)
        self.up_proj = linear(config, width, inner, rngs, bias)
        self.down_proj = linear(config, inner, width, rngs, bias)
        # A config.json may contain both hidden_act and hidden_activation. Each family uses the one
        # that its configuration class defines.
        own_name = hasattr(type(config), "hidden_activation")
        name = "hidden_activation" if own_name else "hidden_act"
        self.act = nn.activation(getattr(config, name))

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(nnx.Module):
    """Gated feed-forward block with one projection for the gate and the gated features."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = linear(config, width, 2 * inner, rngs, bias=False)
        self.down_proj = linear(config, inner, width, rngs, bias=False)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(self.act(gate) * up)


class UngatedMLP(nnx.Module):
    """Feed-forward block without a gate. The family defines the names of its two projections."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        options = family_options(config)
        self.names, bias = options.mlp_names, is_enabled(config, options.mlp_bias)
        sizes = config.hidden_size, config.intermediate_size
        setattr(self, self.names[0], linear(config, *sizes, rngs, bias))
        setattr(self, self.names[1], linear(config, *sizes[::-1], rngs, bias))
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        inputs, outputs = (getattr(self, name) for name in self.names)
        return outputs(self.act(inputs(x)))


def feed_forward(config: PreTrainedConfig, rngs: nnx.Rngs) -> MLP | FusedMLP | UngatedMLP:
    """Creates the dense feed-forward block that the family uses."""
    options = family_options(config)
    if options.mlp_names:
        return UngatedMLP(config, rngs)
    return FusedMLP(config, rngs) if options.fused_mlp else MLP(config, rngs)
