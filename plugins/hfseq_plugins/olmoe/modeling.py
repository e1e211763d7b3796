"""OLMoE (Muennighoff et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import OlmoeConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.experts import JOINED
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxOlmoePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the OLMoE models."""

    config_class = OlmoeConfig
    joined_weights = JOINED


class FlaxOlmoeModel(FlaxOlmoePreTrainedModel):
    """OLMoE without a head. Returns hidden states."""

    module_class = Decoder


class FlaxOlmoeForCausalLM(CausalGeneration, FlaxOlmoePreTrainedModel):
    """OLMoE with a language modeling head."""

    module_class = CausalLM
