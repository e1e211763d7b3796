"""Ministral (Mistral AI, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import MinistralConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxMinistralPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Ministral models."""

    config_class = MinistralConfig


class FlaxMinistralModel(FlaxMinistralPreTrainedModel):
    """Ministral without a head. Returns hidden states."""

    module_class = Decoder


class FlaxMinistralForCausalLM(CausalGeneration, FlaxMinistralPreTrainedModel):
    """Ministral with a language modeling head."""

    module_class = CausalLM


class FlaxMinistralForSequenceClassification(FlaxMinistralPreTrainedModel):
    """Ministral for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxMinistralForQuestionAnswering(FlaxMinistralPreTrainedModel):
    """Ministral for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxMinistralForTokenClassification(FlaxMinistralPreTrainedModel):
    """Ministral for token classification."""

    module_class = TokenClassification
