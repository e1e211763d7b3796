"""XLM-RoBERTa-XL (Goyal et al., 2021): XLM-RoBERTa with pre-norm layers.

The embeddings are not normalized. A final norm follows the last layer.
"""

from __future__ import annotations

import jax
from flax import nnx
from transformers import XLMRobertaXLConfig

from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.megatron_bert import modeling as megatron
from hfseq_plugins.roberta import modeling as roberta


class Attention(megatron.Attention):
    """Norm, attention and its output projection."""

    norm_name = "self_attn_layer_norm"


class Output(megatron.Output):
    """Projection to the hidden size and residual connection, without dropout."""

    def __init__(self, config: XLMRobertaXLConfig, features_in: int, rngs: nnx.Rngs):
        super().__init__(config, features_in, rngs)
        self.dropout.rate = 0.0


class Layer(encoder.Layer):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    submodule_classes = (Attention, encoder.Intermediate, Output)

    def __init__(self, config: XLMRobertaXLConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.LayerNorm = megatron.norm(config)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Normalizes `x`, `(batch, length, hidden)`, and applies the feed-forward block."""
        return self.output(self.intermediate(self.LayerNorm(x)), x, rngs)


class Encoder(encoder.Encoder):
    """Stack of layers with a final norm."""

    layer_class = Layer

    def __init__(self, config: XLMRobertaXLConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.LayerNorm = megatron.norm(config)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer."""
        return self.LayerNorm(x)


class XLMRobertaXLModule(roberta.RobertaModule):
    """XLM-RoBERTa-XL encoder without a head. It is a decoder if `config.is_decoder` is set."""

    submodule_classes = (megatron.Embeddings, Encoder)


class XLMRobertaXLMixin(bert.ModelWithHead):
    """Mixin that sets the encoder class. In checkpoints, the encoder is named as in RoBERTa."""

    prefix = "roberta"
    module = XLMRobertaXLModule


class MaskedLM(XLMRobertaXLMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(XLMRobertaXLMixin, roberta.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class SequenceClassification(XLMRobertaXLMixin, roberta.SequenceClassification):
    """Sequence classification or regression."""


class MultipleChoice(XLMRobertaXLMixin, roberta.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(XLMRobertaXLMixin, roberta.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(XLMRobertaXLMixin, roberta.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxXLMRobertaXLPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base class of the XLM-RoBERTa-XL models."""

    config_class = XLMRobertaXLConfig


class FlaxXLMRobertaXLModel(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL without a head. Returns hidden states and the pooled first token."""

    module_class = XLMRobertaXLModule


class FlaxXLMRobertaXLForMaskedLM(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL with a masked language modeling head."""

    module_class = MaskedLM


class FlaxXLMRobertaXLForCausalLM(CausalGeneration, FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxXLMRobertaXLForSequenceClassification(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxXLMRobertaXLForMultipleChoice(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL for multiple choice."""

    module_class = MultipleChoice


class FlaxXLMRobertaXLForTokenClassification(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL for token classification."""

    module_class = TokenClassification


class FlaxXLMRobertaXLForQuestionAnswering(FlaxXLMRobertaXLPreTrainedModel):
    """XLM-RoBERTa-XL for extractive question answering."""

    module_class = QuestionAnswering
