"""Gemma 3 (Gemma Team, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Gemma3TextConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
)


class FlaxGemma3TextPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Gemma 3 models."""

    config_class = Gemma3TextConfig


class FlaxGemma3TextModel(FlaxGemma3TextPreTrainedModel):
    """Gemma 3 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGemma3ForCausalLM(CausalGeneration, FlaxGemma3TextPreTrainedModel):
    """Gemma 3 with a language modeling head."""

    module_class = CausalLM


class FlaxGemma3TextForSequenceClassification(FlaxGemma3TextPreTrainedModel):
    """Gemma 3 for sequence classification, from the last token."""

    module_class = SequenceClassification
