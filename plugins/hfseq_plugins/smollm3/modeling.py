"""SmolLM3 (Bakouch et al., 2025) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the SmolLM3 classes."""

    config_class = SmolLM3Config


class FlaxSmolLM3Model(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 without a head: hidden states."""

    module_class = Decoder


class FlaxSmolLM3ForCausalLM(CausalGeneration, FlaxSmolLM3PreTrainedModel):
    """SmolLM3 with its language-modelling head."""

    module_class = CausalLM


class FlaxSmolLM3ForSequenceClassification(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxSmolLM3ForQuestionAnswering(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 that marks the span of an answer."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxSmolLM3ForTokenClassification(FlaxSmolLM3PreTrainedModel):
    """SmolLM3 with a classifier on every token."""

    module_class = TokenClassification
