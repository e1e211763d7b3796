"""SmolLM3 (Bakouch et al., 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import SmolLM3Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxSmolLM3PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the SmolLM3 models."""

    config_class = SmolLM3Config


class FlaxSmolLM3Model(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxSmolLM3ForCausalLM(CausalGeneration, FlaxSmolLM3PreTrainedModel):
    """SmolLM3 with a language modeling head."""

    module_class = CausalLM


class FlaxSmolLM3ForSequenceClassification(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxSmolLM3ForQuestionAnswering(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxSmolLM3ForTokenClassification(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 for token classification."""

    module_class = TokenClassification
