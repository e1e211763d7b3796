"""GLM-4 (GLM Team, 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Glm4Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxGlm4PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the GLM-4 models."""

    config_class = Glm4Config


class FlaxGlm4Model(FlaxGlm4PreTrainedModel):
    """GLM-4 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGlm4ForCausalLM(CausalGeneration, FlaxGlm4PreTrainedModel):
    """GLM-4 with a language modeling head."""

    module_class = CausalLM


class FlaxGlm4ForSequenceClassification(FlaxGlm4PreTrainedModel):
    """GLM-4 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGlm4ForTokenClassification(FlaxGlm4PreTrainedModel):
    """GLM-4 for token classification."""

    module_class = TokenClassification
