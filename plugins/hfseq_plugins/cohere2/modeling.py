"""Cohere 2 (Cohere, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Cohere2Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxCohere2PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Cohere 2 models."""

    config_class = Cohere2Config


class FlaxCohere2Model(FlaxCohere2PreTrainedModel):
    """Cohere 2 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxCohere2ForCausalLM(CausalGeneration, FlaxCohere2PreTrainedModel):
    """Cohere 2 with a language modeling head."""

    module_class = CausalLM
