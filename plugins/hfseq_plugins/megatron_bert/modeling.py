"""MegatronBERT (Shoeybi et al., 2019): BERT with the norms in front of the blocks.

No norm follows the embeddings; one ends the stack.
"""

from __future__ import annotations

from typing import ClassVar

import jax
from flax import nnx
from transformers import MegatronBertConfig

from hfseq import nn
from hfseq.nn import Keys
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert


def norm(config: MegatronBertConfig) -> nn.LayerNorm:
    """Return a norm over the hidden size."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps)


class Embeddings(encoder.Embeddings):
    """Word, position and token-type vectors, summed."""

    use_layer_norm = False


class Output(nnx.Module):
    """Projection back to the residual stream, dropout, residual."""

    linear = staticmethod(encoder.dense)

    def __init__(self, config: MegatronBertConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = self.linear(config, features_in, config.hidden_size, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x: jax.Array, residual: jax.Array, rngs: Keys | None) -> jax.Array:
        return residual + self.dropout(self.dense(x), rngs)


class Attention(encoder.Attention):
    """Norm, attention and its output projection."""

    submodule_classes = (encoder.SelfAttention, Output)
    norm_name: ClassVar[str] = "ln"

    def __init__(self, config: MegatronBertConfig, rngs: nnx.Rngs, cross: bool = False):
        setattr(self, self.norm_name, norm(config))
        super().__init__(config, rngs, cross)

    def __call__(self, x, source, mask, rngs, head_mask=None, return_weights=False):
        normed = getattr(self, self.norm_name)(x)
        # An encoder's output has been normalised at its end, and is read as it is.
        source = normed if source is x else source
        mixed, weights = self.self(normed, source, mask, rngs, head_mask, return_weights)
        return self.output(mixed, x, rngs), weights


class Layer(encoder.Layer):
    """Self-attention, cross-attention where the configuration asks for it, feed-forward."""

    submodule_classes = (Attention, encoder.Intermediate, Output)

    def __init__(self, config: MegatronBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = norm(config)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Run the wide block on normalised (batch, length, hidden_size)."""
        return self.output(self.intermediate(self.ln(x)), x, rngs)


class Encoder(encoder.Encoder):
    """The stack of layers, normalised once more at its end."""

    layer_class = Layer

    def __init__(self, config: MegatronBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = norm(config)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalise the output of the last layer."""
        return self.ln(x)


class MegatronBertModule(encoder.BertModule):
    """The encoder (or decoder) without a head."""

    submodule_classes = (Embeddings, Encoder)


class MaskedLM(bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    module = MegatronBertModule


class SequenceClassification(bert.SequenceClassification):
    """A label (or a number) for the whole sequence."""

    module = MegatronBertModule


class FlaxMegatronBertPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base of the MegatronBERT classes."""

    config_class = MegatronBertConfig


class FlaxMegatronBertModel(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT without a head: hidden states and the pooled first token."""

    module_class = MegatronBertModule


class FlaxMegatronBertForMaskedLM(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT with the masked-LM head."""

    module_class = MaskedLM


class FlaxMegatronBertForSequenceClassification(FlaxMegatronBertPreTrainedModel):
    """MegatronBERT with a classifier on the pooled first token."""

    module_class = SequenceClassification
