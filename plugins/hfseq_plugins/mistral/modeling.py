"""Mistral (Jiang et al., 2023) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

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
    """Base class of the Mistral models."""

    config_class = MistralConfig


class FlaxMistralModel(FlaxMistralPreTrainedModel):
    """Mistral without a head. Returns hidden states."""

    module_class = Decoder


class FlaxMistralForCausalLM(CausalGeneration, FlaxMistralPreTrainedModel):
    """Mistral with a language modeling head."""

    module_class = CausalLM


class FlaxMistralForSequenceClassification(FlaxMistralPreTrainedModel):
    """Mistral for sequence classification, from the last token."""

    module_class = SequenceClassification


class MistralQuestionAnswering(QuestionAnswering):
    """Extractive question answering. Mistral checkpoints name the decoder `model`."""

    decoder_name = "model"


class FlaxMistralForQuestionAnswering(FlaxMistralPreTrainedModel):
    """Mistral for extractive question answering."""

    module_class = MistralQuestionAnswering


class FlaxMistralForTokenClassification(FlaxMistralPreTrainedModel):
    """Mistral for token classification."""

    module_class = TokenClassification
