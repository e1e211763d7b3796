"""The layers of the FP8 encoder: MegatronBERT's, with the options of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.megatron_bert import modeling as megatron

if TYPE_CHECKING:
    from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig


def kernel_init(config: Fp8EncoderConfig) -> nn.Initializer:
    """Return the initialiser of kernels: that of the stock classes, or of TransformerEngine."""
    if config.kernel_init == "normal":
        return nn.normal(config.initializer_range)
    return jax.nn.initializers.lecun_normal()


def linear(
    config: Fp8EncoderConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """A Linear with the chosen initialisation, with or without bias."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=config.use_bias)


def table(config: Fp8EncoderConfig, size: int, rngs: nnx.Rngs) -> nn.Embed:
    """Return ``size`` vectors with the chosen deviation."""
    std = config.embedding_init_std
    std = config.initializer_range if std is None else std
    return nn.Embed(size, config.hidden_size, nn.normal(std), rngs)


class Embeddings(nnx.Module):
    """Word vectors, and those of positions and token types where the model has them, summed."""

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        places = config.max_position_embeddings if config.positions == "learned" else 0
        types, rate = config.type_vocab_size, config.embedding_dropout_prob
        self.word_embeddings = table(config, config.vocab_size, rngs)
        self.position_embeddings = table(config, places, rngs) if places else nnx.data(None)
        self.token_type_embeddings = table(config, types, rngs) if types else nnx.data(None)
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array, rngs: Keys | None):
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return self.dropout(x, rngs)


class SelfAttention(encoder.SelfAttention):
    """Attention of a sequence to itself."""

    linear = staticmethod(linear)


class Output(megatron.Output):
    """Projection back to the residual stream, dropout, residual."""

    linear = staticmethod(linear)


class Intermediate(encoder.Intermediate):
    """The wide half of the feed-forward block; gated, a second projection multiplies the first."""

    linear = staticmethod(linear)

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        sizes = config.hidden_size, config.intermediate_size
        self.up = linear(config, *sizes, rngs) if config.gated_mlp else nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = super().__call__(x)
        return wide if self.up is None else wide * self.up(x)


class Attention(megatron.Attention):
    """Norm, attention and its output projection."""

    kinds = (SelfAttention, Output)


class Layer(megatron.Layer):
    """Self-attention and feed-forward."""

    kinds = (Attention, Intermediate, Output)


class Encoder(encoder.Encoder):
    """The stack of layers, normalised once more at its end unless told."""

    kind = Layer

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = megatron.norm(config) if config.final_norm else nnx.data(None)

    def finish(self, x: jax.Array) -> jax.Array:
        """Normalise the output of the last layer."""
        return x if self.ln is None else self.ln(x)


class Fp8EncoderModule(encoder.BertModule):
    """The encoder without a head."""

    kinds = (Embeddings, Encoder)

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        config.check()  # options may have been set since it was made
        super().__init__(config, rngs, add_pooling_layer)


class MaskedLM(bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    module = Fp8EncoderModule


class FlatClassifier(nnx.Module):
    """All positions side by side through two products, then the labels; no activation between.

    Padding counts as zeros, so that a row gives the same logits however far it is padded
    (TransformerEngine's example reads what the encoder makes of padding).
    """

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, kernel_init(config)
        self.length = config.flatten_length
        self.flatten = nn.Linear(self.length * width, width, init, rngs)
        self.dense = nn.Linear(width, width, init, rngs)
        self.out_proj = nn.Linear(width, config.num_labels, init, rngs)

    def __call__(self, x: jax.Array, real: jax.Array | None) -> jax.Array:
        """Map (batch, length, hidden_size) to (batch, labels); ``real`` (batch, length) or all."""
        if real is not None:
            x = jnp.where(real[..., None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.length - x.shape[1]), (0, 0)))
        return self.out_proj(self.dense(self.flatten(x.reshape(x.shape[0], -1))))


class SequenceClassification(bert.Headed):
    """A label (or a number) for the whole sequence."""

    module = Fp8EncoderModule

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        self.pooled = config.head == "pooled"  # type: ignore[misc]
        super().__init__(config, rngs)
        if self.pooled:
            self.classifier = encoder.dense(config, config.hidden_size, config.num_labels, rngs)
        else:
            self.classifier = FlatClassifier(config, rngs)

    def __call__(
        self, input_ids, attention_mask=None, *, segment_ids=None, rngs=None, **kwargs: Any
    ):
        encoded = self.encode(
            input_ids, attention_mask, segment_ids=segment_ids, rngs=rngs, **kwargs
        )
        if self.pooled:
            logits = self.classifier(self.dropout(encoded.pooler_output, rngs))
        else:
            real = real_tokens(attention_mask, segment_ids)
            logits = self.classifier(encoded.last_hidden_state, real)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


def real_tokens(
    attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """Return which tokens are no padding, (batch, length), or None where all are real.

    ``attention_mask`` is (batch, length), or (batch, queries, length).
    """
    real = None if segment_ids is None else segment_ids > 0
    if attention_mask is None:
        return real
    seen = attention_mask.astype(bool)
    seen = seen if seen.ndim == 2 else seen.any(1)
    return seen if real is None else real & seen
