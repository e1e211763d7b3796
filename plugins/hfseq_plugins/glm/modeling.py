"""GLM (GLM Team, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import GlmConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxGlmPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the GLM models."""

    config_class = GlmConfig


class FlaxGlmModel(FlaxGlmPreTrainedModel):
    """GLM without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGlmForCausalLM(CausalGeneration, FlaxGlmPreTrainedModel):
    """GLM with a language modeling head."""

    module_class = CausalLM


class FlaxGlmForSequenceClassification(FlaxGlmPreTrainedModel):
    """GLM for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGlmForTokenClassification(FlaxGlmPreTrainedModel):
    """GLM for token classification."""

    module_class = TokenClassification
