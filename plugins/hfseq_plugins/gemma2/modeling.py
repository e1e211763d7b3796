"""Gemma 2 (Gemma Team, 2024) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

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
    """Base of the Gemma 2 classes."""

    config_class = Gemma2Config


class FlaxGemma2Model(FlaxGemma2PreTrainedModel):
    """Gemma 2 without a head: hidden states."""

    module_class = Decoder


class FlaxGemma2ForCausalLM(CausalGeneration, FlaxGemma2PreTrainedModel):
    """Gemma 2 with its language-modelling head."""

    module_class = CausalLM


class FlaxGemma2ForSequenceClassification(FlaxGemma2PreTrainedModel):
    """Gemma 2 with a classifier on the last token."""

    module_class = SequenceClassification


class FlaxGemma2ForTokenClassification(FlaxGemma2PreTrainedModel):
    """Gemma 2 with a classifier on every token."""

    module_class = TokenClassification
