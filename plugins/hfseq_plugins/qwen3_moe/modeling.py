"""Qwen3-MoE (Yang et al., 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Qwen3MoeConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.experts import JOINED
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxQwen3MoePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Qwen3-MoE models."""

    config_class = Qwen3MoeConfig
    joined_weights = JOINED


class FlaxQwen3MoeModel(FlaxQwen3MoePreTrainedModel):
    """Qwen3-MoE without a head. Returns hidden states."""

    module_class = Decoder


class FlaxQwen3MoeForCausalLM(CausalGeneration, FlaxQwen3MoePreTrainedModel):
    """Qwen3-MoE with a language modeling head."""

    module_class = CausalLM


class FlaxQwen3MoeForSequenceClassification(FlaxQwen3MoePreTrainedModel):
    """Qwen3-MoE for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxQwen3MoeForQuestionAnswering(FlaxQwen3MoePreTrainedModel):
    """Qwen3-MoE for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxQwen3MoeForTokenClassification(FlaxQwen3MoePreTrainedModel):
    """Qwen3-MoE for token classification."""

    module_class = TokenClassification
