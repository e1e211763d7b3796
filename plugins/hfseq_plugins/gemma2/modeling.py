"""Gemma 2 (Gemma Team, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Gemma2Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxGemma2PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Gemma 2 models."""

    config_class = Gemma2Config


class FlaxGemma2Model(FlaxGemma2PreTrainedModel):
    """Gemma 2 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGemma2ForCausalLM(CausalGeneration, FlaxGemma2PreTrainedModel):
    """Gemma 2 with a language modeling head."""

    module_class = CausalLM


class FlaxGemma2ForSequenceClassification(FlaxGemma2PreTrainedModel):
    """Gemma 2 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGemma2ForTokenClassification(FlaxGemma2PreTrainedModel):
    """Gemma 2 for token classification."""

    module_class = TokenClassification
