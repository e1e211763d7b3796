"""Helium (Kyutai, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import HeliumConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxHeliumPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Helium models."""

    config_class = HeliumConfig


class FlaxHeliumModel(FlaxHeliumPreTrainedModel):
    """Helium without a head. Returns hidden states."""

    module_class = Decoder


class FlaxHeliumForCausalLM(CausalGeneration, FlaxHeliumPreTrainedModel):
    """Helium with a language modeling head."""

    module_class = CausalLM


class FlaxHeliumForSequenceClassification(FlaxHeliumPreTrainedModel):
    """Helium for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxHeliumForTokenClassification(FlaxHeliumPreTrainedModel):
    """Helium for token classification."""

    module_class = TokenClassification
