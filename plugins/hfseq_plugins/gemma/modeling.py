"""Gemma (Gemma Team, 2024) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the Gemma classes."""

    config_class = GemmaConfig


class FlaxGemmaModel(FlaxGemmaPreTrainedModel):
    """Gemma without a head: hidden states."""

    module_class = Decoder


class FlaxGemmaForCausalLM(CausalGeneration, FlaxGemmaPreTrainedModel):
    """Gemma with its language-modelling head."""

    module_class = CausalLM


class FlaxGemmaForSequenceClassification(FlaxGemmaPreTrainedModel):
    """Gemma with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxGemmaForTokenClassification(FlaxGemmaPreTrainedModel):
    """Gemma with a classifier on every token."""

    module_class = TokenClassification
