"""Granite (Granite Team, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import GraniteConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxGranitePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Granite models."""

    config_class = GraniteConfig


class FlaxGraniteModel(FlaxGranitePreTrainedModel):
    """Granite without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGraniteForCausalLM(CausalGeneration, FlaxGranitePreTrainedModel):
    """Granite with a language modeling head."""

    module_class = CausalLM
