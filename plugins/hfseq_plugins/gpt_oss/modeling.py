"""gpt-oss (OpenAI, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import GptOssConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxGptOssPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the gpt-oss models."""

    config_class = GptOssConfig


class FlaxGptOssModel(FlaxGptOssPreTrainedModel):
    """gpt-oss without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGptOssForCausalLM(CausalGeneration, FlaxGptOssPreTrainedModel):
    """gpt-oss with a language modeling head."""

    module_class = CausalLM


class FlaxGptOssForSequenceClassification(FlaxGptOssPreTrainedModel):
    """gpt-oss for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGptOssForTokenClassification(FlaxGptOssPreTrainedModel):
    """gpt-oss for token classification."""

    module_class = TokenClassification
