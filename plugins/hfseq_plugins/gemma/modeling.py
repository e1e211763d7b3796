"""Gemma (Gemma Team, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import GemmaConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxGemmaPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Gemma models."""

    config_class = GemmaConfig


class FlaxGemmaModel(FlaxGemmaPreTrainedModel):
    """Gemma without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGemmaForCausalLM(CausalGeneration, FlaxGemmaPreTrainedModel):
    """Gemma with a language modeling head."""

    module_class = CausalLM


class FlaxGemmaForSequenceClassification(FlaxGemmaPreTrainedModel):
    """Gemma for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGemmaForTokenClassification(FlaxGemmaPreTrainedModel):
    """Gemma for token classification."""

    module_class = TokenClassification
