"""XLM-RoBERTa (Conneau et al., 2020): RoBERTa for a hundred languages, with a larger vocabulary."""

from __future__ import annotations

from transformers import XLMRobertaConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.roberta import modeling as roberta


class FlaxXLMRobertaPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base of the XLM-RoBERTa classes."""

    config_class = XLMRobertaConfig


class FlaxXLMRobertaModel(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa without a head: hidden states and the pooled first token."""

    module_class = roberta.RobertaModule


class FlaxXLMRobertaForMaskedLM(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa with the masked-LM head."""

    module_class = roberta.MaskedLM


class FlaxXLMRobertaForCausalLM(CausalGeneration, FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa as a decoder; set ``is_decoder=True`` in the configuration."""

    module_class = roberta.CausalLM


class FlaxXLMRobertaForSequenceClassification(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa with a classifier on the first token."""

    module_class = roberta.SequenceClassification


class FlaxXLMRobertaForMultipleChoice(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa that scores continuations."""

    module_class = roberta.MultipleChoice


class FlaxXLMRobertaForTokenClassification(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa with a classifier on every token."""

    module_class = roberta.TokenClassification


class FlaxXLMRobertaForQuestionAnswering(FlaxXLMRobertaPreTrainedModel):
    """XLM-RoBERTa that marks the span of an answer."""

    module_class = roberta.QuestionAnswering
