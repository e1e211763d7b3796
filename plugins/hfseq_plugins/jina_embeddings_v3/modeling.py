"""Jina embeddings v3 (Sturua et al., 2024): XLM-RoBERTa with rotary positions.

The encoder is implemented by `hfseq_plugins.rotary_bert`, and the heads are those of RoBERTa. As in
Transformers, the low-rank adapters of the published model are not part of the encoder.
"""

from __future__ import annotations

import jax
from flax import nnx
from transformers import JinaEmbeddingsV3Config

from hfseq import nn
from hfseq.nn import Keys
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.roberta import modeling as roberta
from hfseq_plugins.rotary_bert import modeling as rotary
from hfseq_plugins.rotary_bert.modeling import linear


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: JinaEmbeddingsV3Config, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.fc1 = linear(config, width, inner, rngs, bias=True)
        self.fc2 = linear(config, inner, width, rngs, bias=True)
        self.act = nn.activation(config.hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))


class Layer(rotary.Layer):
    """Post-norm layer: attention and feed-forward."""

    mlp_class = MLP
    names = ("mixer", "norm1", "norm2")


class JinaEmbeddingsV3(rotary.RotaryBert):
    """Encoder without a head."""

    layer_class = Layer

    def __init__(
        self, config: JinaEmbeddingsV3Config, rngs: nnx.Rngs, add_pooling_layer: bool = True
    ):
        super().__init__(config, rngs, add_pooling_layer)


class JinaMixin(bert.ModelWithHead):
    """Mixin that sets the encoder class. In checkpoints, the encoder is named as in RoBERTa."""

    prefix = "roberta"
    module = JinaEmbeddingsV3


class MaskedLM(JinaMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class SequenceClassification(JinaMixin, roberta.SequenceClassification):
    """Sequence classification or regression."""


class TokenClassification(JinaMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(JinaMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxJinaEmbeddingsV3PreTrainedModel(rotary.FlaxRotaryBertPreTrainedModel):
    """Base class of the Jina embeddings v3 models."""

    config_class = JinaEmbeddingsV3Config
    base_model_prefix = "roberta"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class FlaxJinaEmbeddingsV3Model(FlaxJinaEmbeddingsV3PreTrainedModel):
    """Jina embeddings v3 without a head. Returns hidden states and the pooled first token."""

    module_class = JinaEmbeddingsV3


class FlaxJinaEmbeddingsV3ForMaskedLM(FlaxJinaEmbeddingsV3PreTrainedModel):
    """Jina embeddings v3 with a masked language modeling head."""

    module_class = MaskedLM


class FlaxJinaEmbeddingsV3ForSequenceClassification(FlaxJinaEmbeddingsV3PreTrainedModel):
    """Jina embeddings v3 for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxJinaEmbeddingsV3ForTokenClassification(FlaxJinaEmbeddingsV3PreTrainedModel):
    """Jina embeddings v3 for token classification."""

    module_class = TokenClassification


class FlaxJinaEmbeddingsV3ForQuestionAnswering(FlaxJinaEmbeddingsV3PreTrainedModel):
    """Jina embeddings v3 for extractive question answering."""

    module_class = QuestionAnswering
