"""The layers of the WMT Transformer: BART's, with the options of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.positions import PositionTable, SinusoidalPositions
from hfseq_plugins.wmt_transformer.differential import DifferentialMix, initial_lambdas

if TYPE_CHECKING:
    from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig


def kernel_init(config: WMTTransformerConfig) -> nn.Initializer:
    """Return the initialiser of kernels: that of the reference, or that of the stock classes."""
    if config.kernel_init == "normal":
        return nn.normal(config.init_std)
    return jax.nn.initializers.xavier_uniform()


def dense(
    config: WMTTransformerConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """A Linear with the chosen initialisation."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs)


def token_table(config: WMTTransformerConfig, rngs: nnx.Rngs, size: int | None = None) -> nn.Embed:
    """Vectors of the vocabulary, of unit variance after ``scale_embedding`` unless told."""
    std = config.d_model**-0.5 if config.embedding_init_std is None else config.embedding_init_std
    return nn.Embed(size or config.vocab_size, config.d_model, nn.normal(std), rngs)


class Attention(layers.Attention):
    """Attention whose heads may be wider or narrower than the model, with or without biases."""

    @staticmethod
    def dense(
        config: WMTTransformerConfig, features_in: int, features_out: int, rngs: nnx.Rngs
    ) -> nn.Linear:
        """A Linear with the chosen initialisation, with or without bias."""
        bias = config.attention_bias
        return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=bias)

    @staticmethod
    def inner_width(config: WMTTransformerConfig) -> int:
        """Return the width of all heads together."""
        return config.inner_width


class DifferentialAttention(DifferentialMix, Attention):
    """Attention by the difference of two softmax maps."""


def attention(config: WMTTransformerConfig, *args: Any, **kind: Any) -> Attention:
    """Make the attention that the configuration names."""
    made = DifferentialAttention if config.attention == "differential" else Attention
    return made(config, *args, **kind)


class Optional:
    """What layers of both sides take from the configuration."""

    attention, dense = staticmethod(attention), staticmethod(dense)

    def __init__(self: layers.Layer, config: WMTTransformerConfig, rngs: nnx.Rngs):
        self.norm_first = config.norm == "pre"
        super().__init__(config, rngs)  # type: ignore[call-arg]


class EncoderLayer(Optional, layers.EncoderLayer):
    """Self-attention and feed-forward."""


class DecoderLayer(Optional, layers.DecoderLayer):
    """Causal self-attention, attention to the encoder's output, feed-forward."""


class OptionalSide:
    """What both sides take from the configuration."""

    embedding_norm = False
    token_table = staticmethod(token_table)

    def __init__(
        self: layers.Side,
        config: WMTTransformerConfig,
        rngs: nnx.Rngs,
        own_table: bool,
        **kwargs: Any,
    ):
        self.norm_first, self.differential = config.norm == "pre", config.attention != "softmax"
        super().__init__(config, rngs, own_table, **kwargs)  # type: ignore[call-arg]
        self.depth = getattr(config, f"{self.side}_layers")

    @staticmethod
    def positions(config: WMTTransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
        """Places: a table that is trained, or sines and cosines."""
        learned = config.positions == "learned"
        return (PositionTable if learned else SinusoidalPositions)(config, rngs)

    def per_layer(self: layers.Side) -> dict[str, jax.Array] | None:
        """Tell each layer how much of the second map it subtracts at the start."""
        return {"initial": initial_lambdas(self.depth)} if self.differential else None


class Encoder(OptionalSide, layers.Encoder):
    """The encoder."""

    layer, side = EncoderLayer, "encoder"


class Decoder(OptionalSide, layers.Decoder):
    """The decoder."""

    layer, side = DecoderLayer, "decoder"


class WMTTransformerModule(heads.BartModule):
    """Encoder and decoder without a head."""

    sides = (Encoder, Decoder)

    def __init__(self, config: WMTTransformerConfig, rngs: nnx.Rngs):
        config.check()  # options may have been set since it was made
        self.shared = token_table(config, rngs) if config.share_embeddings else nnx.data(None)
        self.add_sides(config, rngs, own_tables=not config.share_embeddings)


def head(config: WMTTransformerConfig, rngs: nnx.Rngs, size: int) -> nn.Linear | None:
    """The head's own projection, or nothing where it is tied to the target's table."""
    if config.logits_via_embedding:
        return nnx.data(None)
    return nn.Linear(config.d_model, size, kernel_init(config), rngs, use_bias=False)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token; a head of its own has a bias that is trained."""

    module, make_head = WMTTransformerModule, staticmethod(head)

    def logits_bias(self) -> jax.Array:
        """Return what is added to the logits, (1, vocabulary)."""
        bias: jax.Array = jnp.asarray(self.final_logits_bias[...])
        return bias if self.lm_head is not None else jax.lax.stop_gradient(bias)
