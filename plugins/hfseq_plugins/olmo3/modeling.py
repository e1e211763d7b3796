"""OLMo 3 (Olmo Team, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Olmo3Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
)


class FlaxOlmo3PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the OLMo 3 models."""

    config_class = Olmo3Config


class FlaxOlmo3Model(FlaxOlmo3PreTrainedModel):
    """OLMo 3 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxOlmo3ForCausalLM(CausalGeneration, FlaxOlmo3PreTrainedModel):
    """OLMo 3 with a language modeling head."""

    module_class = CausalLM


class FlaxOlmo3ForSequenceClassification(FlaxOlmo3PreTrainedModel):
    """OLMo 3 for sequence classification, from the last token."""

    module_class = SequenceClassification
