"""Qwen 3 (Yang et al., 2025) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the Qwen 3 classes."""

    config_class = Qwen3Config


class FlaxQwen3Model(FlaxQwen3PreTrainedModel):
    """Qwen 3 without a head: hidden states."""

    module_class = Decoder


class FlaxQwen3ForCausalLM(CausalGeneration, FlaxQwen3PreTrainedModel):
    """Qwen 3 with its language-modelling head."""

    module_class = CausalLM


class FlaxQwen3ForSequenceClassification(FlaxQwen3PreTrainedModel):
    """Qwen 3 with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxQwen3ForQuestionAnswering(FlaxQwen3PreTrainedModel):
    """Qwen 3 that marks the span of an answer."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxQwen3ForTokenClassification(FlaxQwen3PreTrainedModel):
    """Qwen 3 with a classifier on every token."""

    module_class = TokenClassification
