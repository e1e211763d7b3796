"""OLMo (Groeneveld et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import OlmoConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
)


class FlaxOlmoPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the OLMo models."""

    config_class = OlmoConfig


class FlaxOlmoModel(FlaxOlmoPreTrainedModel):
    """OLMo without a head. Returns hidden states."""

    module_class = Decoder


class FlaxOlmoForCausalLM(CausalGeneration, FlaxOlmoPreTrainedModel):
    """OLMo with a language modeling head."""

    module_class = CausalLM


class FlaxOlmoForSequenceClassification(FlaxOlmoPreTrainedModel):
    """OLMo for sequence classification, from the last token."""

    module_class = SequenceClassification
