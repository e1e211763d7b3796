"""OLMo 2 (Walsh et al., 2025) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Olmo2Config

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
)
from hfseq_plugins.decoder.sharding import RULES as DECODER

# The norms of queries and keys have a weight for each feature of each head, so their weights are
# split in the same way as the outputs of the projections.
RULES = [(r"(q|k)_norm/weight$", "column_bias"), *DECODER]


class FlaxOlmo2PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the OLMo 2 models."""

    config_class = Olmo2Config


class FlaxOlmo2Model(FlaxOlmo2PreTrainedModel):
    """OLMo 2 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxOlmo2ForCausalLM(CausalGeneration, FlaxOlmo2PreTrainedModel):
    """OLMo 2 with a language modeling head."""

    module_class = CausalLM


class FlaxOlmo2ForSequenceClassification(FlaxOlmo2PreTrainedModel):
    """OLMo 2 for sequence classification, from the last token."""

    module_class = SequenceClassification
