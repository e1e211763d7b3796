"""Mistral (Jiang et al., 2023) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import MistralConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxMistralPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the Mistral classes."""

    config_class = MistralConfig


class FlaxMistralModel(FlaxMistralPreTrainedModel):
    """Mistral without a head: hidden states."""

    module_class = Decoder


class FlaxMistralForCausalLM(CausalGeneration, FlaxMistralPreTrainedModel):
    """Mistral with its language-modelling head."""

    module_class = CausalLM


class FlaxMistralForSequenceClassification(FlaxMistralPreTrainedModel):
    """Mistral with a classifier on the last token."""

    module_class = SequenceClassification


class MistralQuestionAnswering(QuestionAnswering):
    """Its files call the decoder ``model``, as those of the other heads do."""

    decoder_name = "model"


class FlaxMistralForQuestionAnswering(FlaxMistralPreTrainedModel):
    """Mistral that marks the span of an answer."""

    module_class = MistralQuestionAnswering


class FlaxMistralForTokenClassification(FlaxMistralPreTrainedModel):
    """Mistral with a classifier on every token."""

    module_class = TokenClassification
