"""Llama (Touvron et al., 2023) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the Llama classes."""

    config_class = LlamaConfig


class FlaxLlamaModel(FlaxLlamaPreTrainedModel):
    """Llama without a head: hidden states."""

    module_class = Decoder


class FlaxLlamaForCausalLM(CausalGeneration, FlaxLlamaPreTrainedModel):
    """Llama with its language-modelling head."""

    module_class = CausalLM


class FlaxLlamaForSequenceClassification(FlaxLlamaPreTrainedModel):
    """Llama with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxLlamaForQuestionAnswering(FlaxLlamaPreTrainedModel):
    """Llama that marks the span of an answer."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxLlamaForTokenClassification(FlaxLlamaPreTrainedModel):
    """Llama with a classifier on every token."""

    module_class = TokenClassification
