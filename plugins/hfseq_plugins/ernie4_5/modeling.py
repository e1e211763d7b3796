"""ERNIE 4.5 (Baidu ERNIE Team, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Ernie4_5Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxErnie4_5PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the ERNIE 4.5 models."""

    config_class = Ernie4_5Config


class FlaxErnie4_5Model(FlaxErnie4_5PreTrainedModel):
    """ERNIE 4.5 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxErnie4_5ForCausalLM(CausalGeneration, FlaxErnie4_5PreTrainedModel):
    """ERNIE 4.5 with a language modeling head."""

    module_class = CausalLM
