"""EXAONE 4 (LG AI Research, 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Exaone4Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)


class FlaxExaone4PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the EXAONE 4 models."""

    config_class = Exaone4Config


class FlaxExaone4Model(FlaxExaone4PreTrainedModel):
    """EXAONE 4 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxExaone4ForCausalLM(CausalGeneration, FlaxExaone4PreTrainedModel):
    """EXAONE 4 with a language modeling head."""

    module_class = CausalLM


class FlaxExaone4ForSequenceClassification(FlaxExaone4PreTrainedModel):
    """EXAONE 4 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxExaone4ForQuestionAnswering(FlaxExaone4PreTrainedModel):
    """EXAONE 4 for extractive question answering."""

    module_class = QuestionAnswering
    base_model_prefix = "transformer"


class FlaxExaone4ForTokenClassification(FlaxExaone4PreTrainedModel):
    """EXAONE 4 for token classification."""

    module_class = TokenClassification
