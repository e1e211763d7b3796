"""StableLM (Bellagente et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import StableLmConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxStableLmPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the StableLM models."""

    config_class = StableLmConfig


class FlaxStableLmModel(FlaxStableLmPreTrainedModel):
    """StableLM without a head. Returns hidden states."""

    module_class = Decoder


class FlaxStableLmForCausalLM(CausalGeneration, FlaxStableLmPreTrainedModel):
    """StableLM with a language modeling head."""

    module_class = CausalLM


class FlaxStableLmForSequenceClassification(FlaxStableLmPreTrainedModel):
    """StableLM for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxStableLmForTokenClassification(FlaxStableLmPreTrainedModel):
    """StableLM for token classification."""

    module_class = TokenClassification
