"""Qwen 2 (Yang et al., 2024) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the Qwen 2 classes."""

    config_class = Qwen2Config


class FlaxQwen2Model(FlaxQwen2PreTrainedModel):
    """Qwen 2 without a head: hidden states."""

    module_class = Decoder


class FlaxQwen2ForCausalLM(CausalGeneration, FlaxQwen2PreTrainedModel):
    """Qwen 2 with its language-modelling head."""

    module_class = CausalLM


class FlaxQwen2ForSequenceClassification(FlaxQwen2PreTrainedModel):
    """Qwen 2 with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxQwen2ForQuestionAnswering(FlaxQwen2PreTrainedModel):
    """Qwen 2 that marks the span of an answer."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxQwen2ForTokenClassification(FlaxQwen2PreTrainedModel):
    """Qwen 2 with a classifier on every token."""

    module_class = TokenClassification
