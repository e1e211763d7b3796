"""RoBERTa-PreLayerNorm (Wettig et al., 2023): RoBERTa with the norms in front of the blocks.

A norm follows the embeddings, as in RoBERTa, and one more ends the stack.
"""

from __future__ import annotations

import jax
from flax import nnx
from transformers import RobertaPreLayerNormConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.bert import encoder
from hfseq_plugins.megatron_bert import modeling as megatron
from hfseq_plugins.roberta import modeling as roberta


class Attention(megatron.Attention):
    """Norm, attention and its output projection."""

    norm_name = "LayerNorm"


class Intermediate(encoder.Intermediate):
    """Norm and the wide half of the feed-forward block."""

    def __init__(self, config: RobertaPreLayerNormConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.LayerNorm = megatron.norm(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.LayerNorm(x))


class Layer(encoder.Layer):
    """Self-attention, cross-attention where the configuration asks for it, feed-forward."""

    submodule_classes = (Attention, Intermediate, megatron.Output)


class Encoder(encoder.Encoder):
    """The stack of layers."""

    layer_class = Layer


class RobertaPreLayerNormModule(roberta.RobertaModule):
    """The encoder (or decoder) without a head."""

    submodule_classes = (encoder.Embeddings, Encoder)

    def __init__(
        self, config: RobertaPreLayerNormConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True
    ):
        super().__init__(config, rngs, add_pooling_layer)
        self.LayerNorm = megatron.norm(config)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalise the output of the last layer."""
        return self.LayerNorm(x)


class PreLayerNormMixin:
    """The encoder under its checkpoint name."""

    prefix, module = "roberta_prelayernorm", RobertaPreLayerNormModule


class MaskedLM(PreLayerNormMixin, roberta.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class CausalLM(PreLayerNormMixin, roberta.CausalLM):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""


class SequenceClassification(PreLayerNormMixin, roberta.SequenceClassification):
    """A label (or a number) for the whole sequence."""


class MultipleChoice(PreLayerNormMixin, roberta.MultipleChoice):
    """One of several continuations."""


class TokenClassification(PreLayerNormMixin, roberta.TokenClassification):
    """A label for every token."""


class QuestionAnswering(PreLayerNormMixin, roberta.QuestionAnswering):
    """The first and the last token of the answer."""


class FlaxRobertaPreLayerNormPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base of the RoBERTa-PreLayerNorm classes."""

    config_class = RobertaPreLayerNormConfig
    base_model_prefix = "roberta_prelayernorm"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta_prelayernorm.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class FlaxRobertaPreLayerNormModel(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm without a head: hidden states and the pooled first token."""

    module_class = RobertaPreLayerNormModule


class FlaxRobertaPreLayerNormForMaskedLM(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm with the masked-LM head."""

    module_class = MaskedLM


class FlaxRobertaPreLayerNormForCausalLM(CausalGeneration, FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm as a decoder; set ``is_decoder=True`` in the configuration."""

    module_class = CausalLM


class FlaxRobertaPreLayerNormForSequenceClassification(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxRobertaPreLayerNormForMultipleChoice(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm that scores continuations."""

    module_class = MultipleChoice


class FlaxRobertaPreLayerNormForTokenClassification(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm with a classifier on every token."""

    module_class = TokenClassification


class FlaxRobertaPreLayerNormForQuestionAnswering(FlaxRobertaPreLayerNormPreTrainedModel):
    """RoBERTa-PreLayerNorm that marks the span of an answer."""

    module_class = QuestionAnswering
