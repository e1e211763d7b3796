"""RoBERTa-PreLayerNorm (Wettig et al., 2023): RoBERTa with pre-norm layers.

As in RoBERTa, the embeddings are normalized. A final norm follows the last layer.
"""

from __future__ import annotations

import jax
from flax import nnx
from transformers import RobertaPreLayerNormConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.megatron_bert import modeling as megatron
from hfseq_plugins.roberta import modeling as roberta


class Attention(megatron.Attention):
    """Norm, attention and its output projection."""

    norm_name = "LayerNorm"


class Intermediate(encoder.Intermediate):
    """Norm, followed by the first half of the feed-forward block."""

    def __init__(self, config: RobertaPreLayerNormConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.LayerNorm = megatron.norm(config)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return super().__call__(self.LayerNorm(x))


class Layer(encoder.Layer):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    submodule_classes = (Attention, Intermediate, megatron.Output)


class Encoder(encoder.Encoder):
    """The layers of the encoder."""

    layer_class = Layer


class RobertaPreLayerNormModule(roberta.RobertaModule):
    """RoBERTa-PreLayerNorm encoder without a head.

    It is a decoder if `config.is_decoder` is set.
    """

    submodule_classes = (encoder.Embeddings, Encoder)

    def __init__(
        self, config: RobertaPreLayerNormConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True
    ):
        super().__init__(config, rngs, add_pooling_layer)
        self.LayerNorm = megatron.norm(config)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer."""
        return self.LayerNorm(x)


class PreLayerNormMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in RoBERTa-PreLayerNorm checkpoints."""

    prefix = "roberta_prelayernorm"
    module = RobertaPreLayerNormModule


class MaskedLM(PreLayerNormMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(PreLayerNormMixin, roberta.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class SequenceClassification(PreLayerNormMixin, roberta.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""


class MultipleChoice(PreLayerNormMixin, roberta.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(PreLayerNormMixin, roberta.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(PreLayerNormMixin, roberta.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxRobertaPreLayerNormPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base class of the RoBERTa-PreLayerNorm models."""

    config_class = RobertaPreLayerNormConfig
    base_model_prefix = "roberta_prelayernorm"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta_prelayernorm.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class FlaxRobertaPreLayerNormModel(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm without a head. Returns hidden states and the pooled first token."""

    module_class = RobertaPreLayerNormModule


class FlaxRobertaPreLayerNormForMaskedLM(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm with a masked language modeling head."""

    module_class = MaskedLM


class FlaxRobertaPreLayerNormForCausalLM(CausalGeneration, FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxRobertaPreLayerNormForSequenceClassification(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxRobertaPreLayerNormForMultipleChoice(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm for multiple choice."""

    module_class = MultipleChoice


class FlaxRobertaPreLayerNormForTokenClassification(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm for token classification."""

    module_class = TokenClassification


class FlaxRobertaPreLayerNormForQuestionAnswering(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm for extractive question answering."""

    module_class = QuestionAnswering
