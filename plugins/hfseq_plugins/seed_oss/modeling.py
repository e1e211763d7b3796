"""Seed-OSS (ByteDance Seed Team, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import SeedOssConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxSeedOssPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Seed-OSS models."""

    config_class = SeedOssConfig


class FlaxSeedOssModel(FlaxSeedOssPreTrainedModel):
    """Seed-OSS without a head. Returns hidden states."""

    module_class = Decoder


class FlaxSeedOssForCausalLM(CausalGeneration, FlaxSeedOssPreTrainedModel):
    """Seed-OSS with a language modeling head."""

    module_class = CausalLM


class FlaxSeedOssForSequenceClassification(FlaxSeedOssPreTrainedModel):
    """Seed-OSS for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxSeedOssForQuestionAnswering(FlaxSeedOssPreTrainedModel):
    """Seed-OSS for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxSeedOssForTokenClassification(FlaxSeedOssPreTrainedModel):
    """Seed-OSS for token classification."""

    module_class = TokenClassification
