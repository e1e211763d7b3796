"""Qwen 3 (Yang et al., 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Qwen3Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxQwen3PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Qwen 3 models."""

    config_class = Qwen3Config


class FlaxQwen3Model(FlaxQwen3PreTrainedModel):
    """Qwen 3 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxQwen3ForCausalLM(CausalGeneration, FlaxQwen3PreTrainedModel):
    """Qwen 3 with a language modeling head."""

    module_class = CausalLM


class FlaxQwen3ForSequenceClassification(FlaxQwen3PreTrainedModel):
    """Qwen 3 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxQwen3ForQuestionAnswering(FlaxQwen3PreTrainedModel):
    """Qwen 3 for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxQwen3ForTokenClassification(FlaxQwen3PreTrainedModel):
    """Qwen 3 for token classification."""

    module_class = TokenClassification
