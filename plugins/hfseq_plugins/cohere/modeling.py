"""Cohere (Cohere, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import CohereConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxCoherePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Cohere models."""

    config_class = CohereConfig


class FlaxCohereModel(FlaxCoherePreTrainedModel):
    """Cohere without a head. Returns hidden states."""

    module_class = Decoder


class FlaxCohereForCausalLM(CausalGeneration, FlaxCoherePreTrainedModel):
    """Cohere with a language modeling head."""

    module_class = CausalLM
