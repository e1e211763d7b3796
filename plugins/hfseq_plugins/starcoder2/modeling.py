"""StarCoder2 (Lozhkov et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Starcoder2Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxStarcoder2PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the StarCoder2 models."""

    config_class = Starcoder2Config


class FlaxStarcoder2Model(FlaxStarcoder2PreTrainedModel):
    """StarCoder2 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxStarcoder2ForCausalLM(CausalGeneration, FlaxStarcoder2PreTrainedModel):
    """StarCoder2 with a language modeling head."""

    module_class = CausalLM


class FlaxStarcoder2ForSequenceClassification(FlaxStarcoder2PreTrainedModel):
    """StarCoder2 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxStarcoder2ForTokenClassification(FlaxStarcoder2PreTrainedModel):
    """StarCoder2 for token classification."""

    module_class = TokenClassification
