"""Llama (Touvron et al., 2023) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import LlamaConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxLlamaPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Llama models."""

    config_class = LlamaConfig


class FlaxLlamaModel(FlaxLlamaPreTrainedModel):
    """Llama without a head. Returns hidden states."""

    module_class = Decoder


class FlaxLlamaForCausalLM(CausalGeneration, FlaxLlamaPreTrainedModel):
    """Llama with a language modeling head."""

    module_class = CausalLM


class FlaxLlamaForSequenceClassification(FlaxLlamaPreTrainedModel):
    """Llama for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxLlamaForQuestionAnswering(FlaxLlamaPreTrainedModel):
    """Llama for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxLlamaForTokenClassification(FlaxLlamaPreTrainedModel):
    """Llama for token classification."""

    module_class = TokenClassification
