"""CamemBERT (Martin et al., 2020): RoBERTa trained on French texts."""

from __future__ import annotations

from transformers import CamembertConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.roberta import modeling as roberta


class FlaxCamembertPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base class of the CamemBERT models."""

    config_class = CamembertConfig


class FlaxCamembertModel(FlaxCamembertPreTrainedModel):
    """CamemBERT without a head. Returns hidden states and the pooled first token."""

    module_class = roberta.RobertaModule


class FlaxCamembertForMaskedLM(FlaxCamembertPreTrainedModel):
    """CamemBERT with a masked language modeling head."""

    module_class = roberta.MaskedLM


class FlaxCamembertForCausalLM(CausalGeneration, FlaxCamembertPreTrainedModel):
    """CamemBERT as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = roberta.CausalLM


class FlaxCamembertForSequenceClassification(FlaxCamembertPreTrainedModel):
    """CamemBERT for sequence classification, from the first token."""

    module_class = roberta.SequenceClassification


class FlaxCamembertForMultipleChoice(FlaxCamembertPreTrainedModel):
    """CamemBERT for multiple choice."""

    module_class = roberta.MultipleChoice


class FlaxCamembertForTokenClassification(FlaxCamembertPreTrainedModel):
    """CamemBERT for token classification."""

    module_class = roberta.TokenClassification


class FlaxCamembertForQuestionAnswering(FlaxCamembertPreTrainedModel):
    """CamemBERT for extractive question answering."""

    module_class = roberta.QuestionAnswering
