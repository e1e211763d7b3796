"""XLM-RoBERTa (Conneau et al., 2020): RoBERTa trained on 100 languages."""

from __future__ import annotations

from typing import Any

from transformers import XLMRobertaConfig

from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq_plugins.roberta import modeling as roberta


class FlaxXLMRobertaPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base class of the XLM-RoBERTa models."""

    config_class = XLMRobertaConfig

    def __init__(self, config: XLMRobertaConfig, *args: Any, **kwargs: Any):
        kind = getattr(config, "position_embedding_type", None) or "absolute"
        if kind != "absolute":
            raise UsageError(
                f"position_embedding_type='{kind}' in the configuration is not supported: "
                "XLM-RoBERTa has absolute positions. To load Jina embeddings v3, use "
                "jinaai/jina-embeddings-v3-hf"
            )
        super().__init__(config, *args, **kwargs)


class FlaxXLMRobertaModel(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa without a head. Returns hidden states and the pooled first token."""

    module_class = roberta.RobertaModule


class FlaxXLMRobertaForMaskedLM(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa with a masked language modeling head."""

    module_class = roberta.MaskedLM


class FlaxXLMRobertaForCausalLM(CausalGeneration, FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = roberta.CausalLM


class FlaxXLMRobertaForSequenceClassification(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa for sequence classification, from the first token."""

    module_class = roberta.SequenceClassification


class FlaxXLMRobertaForMultipleChoice(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa for multiple choice."""

    module_class = roberta.MultipleChoice


class FlaxXLMRobertaForTokenClassification(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa for token classification."""

    module_class = roberta.TokenClassification


class FlaxXLMRobertaForQuestionAnswering(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa for extractive question answering."""

    module_class = roberta.QuestionAnswering
