"""Phi (Gunasekar et al., 2023) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import PhiConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxPhiPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Phi models."""

    config_class = PhiConfig


class FlaxPhiModel(FlaxPhiPreTrainedModel):
    """Phi without a head. Returns hidden states."""

    module_class = Decoder


class FlaxPhiForCausalLM(CausalGeneration, FlaxPhiPreTrainedModel):
    """Phi with a language modeling head."""

    module_class = CausalLM


class FlaxPhiForSequenceClassification(FlaxPhiPreTrainedModel):
    """Phi for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxPhiForTokenClassification(FlaxPhiPreTrainedModel):
    """Phi for token classification."""

    module_class = TokenClassification
