"""Data2Vec for text (Baevski et al., 2022): RoBERTa trained to predict hidden states."""

from __future__ import annotations

from transformers import Data2VecTextConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.roberta import modeling as roberta


class Data2VecTextMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in Data2Vec checkpoints."""

    prefix = "data2vec_text"


class MaskedLM(Data2VecTextMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(Data2VecTextMixin, roberta.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class SequenceClassification(Data2VecTextMixin, roberta.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""


class MultipleChoice(Data2VecTextMixin, roberta.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(Data2VecTextMixin, roberta.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(Data2VecTextMixin, roberta.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxData2VecTextPreTrainedModel(roberta.FlaxRobertaPreTrainedModel):
    """Base class of the Data2Vec models for text."""

    config_class = Data2VecTextConfig
    base_model_prefix = "data2vec_text"
    weight_aliases = {
        "lm_head.decoder.weight": "data2vec_text.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class FlaxData2VecTextModel(FlaxData2VecTextPreTrainedModel):
    """Data2Vec without a head. Returns hidden states and the pooled first token."""

    module_class = roberta.RobertaModule


class FlaxData2VecTextForMaskedLM(FlaxData2VecTextPreTrainedModel):
    """Data2Vec with a masked language modeling head."""

    module_class = MaskedLM


class FlaxData2VecTextForCausalLM(CausalGeneration, FlaxData2VecTextPreTrainedModel):
    """Data2Vec as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxData2VecTextForSequenceClassification(FlaxData2VecTextPreTrainedModel):
    """Data2Vec for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxData2VecTextForMultipleChoice(FlaxData2VecTextPreTrainedModel):
    """Data2Vec for multiple choice."""

    module_class = MultipleChoice


class FlaxData2VecTextForTokenClassification(FlaxData2VecTextPreTrainedModel):
    """Data2Vec for token classification."""

    module_class = TokenClassification


class FlaxData2VecTextForQuestionAnswering(FlaxData2VecTextPreTrainedModel):
    """Data2Vec for extractive question answering."""

    module_class = QuestionAnswering
