"""Mistral (Jiang et al., 2023) on Flax NNX: a row of the table of `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import MistralConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import CausalLM, Decoder, FlaxDecoderPreTrainedModel


class FlaxMistralPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the Mistral classes."""

    config_class = MistralConfig


class FlaxMistralModel(FlaxMistralPreTrainedModel):
    """Mistral without a head: hidden states."""

    module_class = Decoder


class FlaxMistralForCausalLM(CausalGeneration, FlaxMistralPreTrainedModel):
    """Mistral with its language-modelling head."""

    module_class = CausalLM
