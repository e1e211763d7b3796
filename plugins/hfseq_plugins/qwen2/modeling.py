"""Qwen 2 (Yang et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Qwen2Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxQwen2PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Qwen 2 models."""

    config_class = Qwen2Config


class FlaxQwen2Model(FlaxQwen2PreTrainedModel):
    """Qwen 2 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxQwen2ForCausalLM(CausalGeneration, FlaxQwen2PreTrainedModel):
    """Qwen 2 with a language modeling head."""

    module_class = CausalLM


class FlaxQwen2ForSequenceClassification(FlaxQwen2PreTrainedModel):
    """Qwen 2 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxQwen2ForQuestionAnswering(FlaxQwen2PreTrainedModel):
    """Qwen 2 for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxQwen2ForTokenClassification(FlaxQwen2PreTrainedModel):
    """Qwen 2 for token classification."""

    module_class = TokenClassification
