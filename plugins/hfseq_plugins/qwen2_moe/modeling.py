"""Qwen2-MoE (Yang et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Qwen2MoeConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.experts import JOINED
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)
from hfseq_plugins.mistral.modeling import MistralQuestionAnswering


class FlaxQwen2MoePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Qwen2-MoE models."""

    config_class = Qwen2MoeConfig
    joined_weights = JOINED


class FlaxQwen2MoeModel(FlaxQwen2MoePreTrainedModel):
    """Qwen2-MoE without a head. Returns hidden states."""

    module_class = Decoder


class FlaxQwen2MoeForCausalLM(CausalGeneration, FlaxQwen2MoePreTrainedModel):
    """Qwen2-MoE with a language modeling head."""

    module_class = CausalLM


class FlaxQwen2MoeForSequenceClassification(FlaxQwen2MoePreTrainedModel):
    """Qwen2-MoE for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxQwen2MoeForQuestionAnswering(FlaxQwen2MoePreTrainedModel):
    """Qwen2-MoE for extractive question answering."""

    module_class = MistralQuestionAnswering


class FlaxQwen2MoeForTokenClassification(FlaxQwen2MoePreTrainedModel):
    """Qwen2-MoE for token classification."""

    module_class = TokenClassification
