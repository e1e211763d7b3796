"""MegatronBERT (Shoeybi et al., 2019): BERT with pre-norm layers.

The embeddings are not normalized. A final norm follows the last layer.
"""

from __future__ import annotations

from typing import ClassVar

import jax
from flax import nnx
from transformers import MegatronBertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert


def norm(config: PreTrainedConfig) -> nn.LayerNorm:
    """Returns a LayerNorm over the hidden size."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps)


class Embeddings(encoder.Embeddings):
    """Sum of word, position and token type embeddings."""

    use_layer_norm = False


class Output(nnx.Module):
    """Projection to the hidden size, dropout and residual connection."""

    linear = staticmethod(encoder.dense)

    def __init__(self, config: PreTrainedConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = self.linear(config, features_in, config.hidden_size, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        residual: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return residual + self.dropout(self.dense(x), rngs)


class Attention(encoder.Attention):
    """Norm, attention and its output projection."""

    submodule_classes = (encoder.SelfAttention, Output)
    norm_name: ClassVar[str] = "ln"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, cross: bool = False):
        setattr(self, self.norm_name, norm(config))
        super().__init__(config, rngs, cross)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        normed = getattr(self, self.norm_name)(x)
        # In cross-attention, `source` is the output of an encoder, which is already normalized.
        source = normed if source is x else source
        attn_output, weights = self.self(normed, source, mask, rngs, head_mask, return_weights)
        return self.output(attn_output, x, rngs), weights


class Layer(encoder.Layer):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    submodule_classes = (Attention, encoder.Intermediate, Output)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = norm(config)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Normalizes `x`, `(batch, length, hidden)`, and applies the feed-forward block."""
        return self.output(self.intermediate(self.ln(x)), x, rngs)


class Encoder(encoder.Encoder):
    """The layers of the encoder, and a final norm."""

    layer_class = Layer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = norm(config)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer."""
        return self.ln(x)


class MegatronBertModule(encoder.BertModule):
    """MegatronBERT encoder without a head. It is a decoder if `config.is_decoder` is set."""

    submodule_classes = (Embeddings, Encoder)


class MaskedLM(bert.MaskedLM):
    """Encoder with a masked language modeling head."""

    module = MegatronBertModule


class SequenceClassification(bert.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""

    module = MegatronBertModule


class FlaxMegatronBertPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base class of the MegatronBERT models."""

    config_class: ClassVar[type[PreTrainedConfig]] = MegatronBertConfig


class FlaxMegatronBertModel(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT without a head. Returns hidden states and the pooled first token."""

    module_class = MegatronBertModule


class FlaxMegatronBertForMaskedLM(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxMegatronBertForSequenceClassification(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT for sequence classification, from the pooled first token."""

    module_class = SequenceClassification
