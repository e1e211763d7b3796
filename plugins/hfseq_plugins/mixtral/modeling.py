"""Mixtral (Jiang et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from typing import ClassVar

from transformers import MixtralConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.experts import MIXTRAL_JOINED
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)
from hfseq_plugins.mistral.modeling import MistralQuestionAnswering


class FlaxMixtralPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Mixtral models."""

    config_class = MixtralConfig
    joined_weights = MIXTRAL_JOINED
    weight_synonyms: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe"}
    module_templates: ClassVar[dict[str, str]] = {"block_sparse_moe": "mlp"}


class FlaxMixtralModel(FlaxMixtralPreTrainedModel):
    """Mixtral without a head. Returns hidden states."""

    module_class = Decoder


class FlaxMixtralForCausalLM(CausalGeneration, FlaxMixtralPreTrainedModel):
    """Mixtral with a language modeling head."""

    module_class = CausalLM


class FlaxMixtralForSequenceClassification(FlaxMixtralPreTrainedModel):
    """Mixtral for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxMixtralForQuestionAnswering(FlaxMixtralPreTrainedModel):
    """Mixtral for extractive question answering."""

    module_class = MistralQuestionAnswering


class FlaxMixtralForTokenClassification(FlaxMixtralPreTrainedModel):
    """Mixtral for token classification."""

    module_class = TokenClassification
