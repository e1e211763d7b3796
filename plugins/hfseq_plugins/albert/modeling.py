"""ALBERT (Lan et al., 2019): BERT with narrow embeddings and layers that share their parameters.

Layer `i` uses the parameters of the layer group `i * num_hidden_groups // num_hidden_layers`.
Module attributes are named as in checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import AlbertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import Embeddings, FlatPooler, SelfAttention, dense
from hfseq_plugins.common import num_labels


class Attention(SelfAttention):
    """Attention, projection, residual connection and norm in one module."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(  # type: ignore[override]  # self-attention only
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = super().__call__(x, x, mask, rngs, return_weights=return_weights)
        return self.LayerNorm(x + self.dropout(self.dense(attn_output), rngs)), weights


class Layer(nnx.Module):
    """Post-norm layer: attention and feed-forward."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.full_layer_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.ffn = dense(config, width, config.intermediate_size, rngs)
        self.ffn_output = dense(config, config.intermediate_size, width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        x, weights = self.attention(x, mask, rngs, return_weights)
        return self.full_layer_layer_norm(x + self.ffn_output(self.act(self.ffn(x)))), weights


class LayerGroup(nnx.Module):
    """A sequence of layers with different parameters, usually a single layer."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.albert_layers = nnx.List([Layer(config, rngs) for _ in range(config.inner_group_num)])

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
        weights: tuple[jax.Array | None, ...] = ()
        for layer in self.albert_layers:
            x, layer_weights = layer(x, mask, rngs, return_weights)
            weights += (layer_weights,)
        return x, weights


class Encoder(nnx.Module):
    """Projects the embeddings to the hidden size and applies the layer groups."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.embedding_hidden_mapping_in = dense(
            config, config.embedding_size, config.hidden_size, rngs
        )
        groups, layers = config.num_hidden_groups, config.num_hidden_layers
        self.albert_layer_groups = nn.Layers([LayerGroup(config, rngs) for _ in range(groups)])
        self.order = tuple(i * groups // layers for i in range(layers))


class AlbertModule(nnx.Module):
    """ALBERT encoder without a head."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        self.pooler = FlatPooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            positions = jnp.arange(input_ids.shape[1])[None]
            position_ids = (
                positions if segment_ids is None else nn.positions_in_segments(segment_ids)
            )
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings(input_ids, token_types, position_ids, rngs)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.albert_layer_groups,
            self.encoder.embedding_hidden_mapping_in(x),
            nn.visible(attention_mask, segment_ids),
            order=self.encoder.order,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=sum(attentions, ()) if output_attentions else None,
        )


class Predictions(bert.VocabularyHead):
    """Language modeling head."""

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary."""
        self.dense = dense(config, config.hidden_size, config.embedding_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.embedding_size, config.layer_norm_eps)
        self.act = nn.activation(config.hidden_act)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Applies the layers before the projection to the vocabulary."""
        return self.LayerNorm(self.act(self.dense(x)))


class AlbertMixin(bert.ModelWithHead):
    """Mixin that gives the encoder and the head their names in ALBERT checkpoints."""

    prefix = "albert"
    module = AlbertModule
    classifier_dropout_field = "classifier_dropout_prob"

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head."""
        self.predictions = Predictions(config, rngs)

    @property
    def vocabulary_head(self) -> Predictions:
        """The language modeling head."""
        return self.predictions


class MaskedLM(AlbertMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""


class SentenceOrder(nnx.Module):
    """Sentence order prediction: classifies whether two sentences are in their original order."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)


class PreTraining(AlbertMixin, bert.LanguageModel):
    """Encoder with heads for masked language modeling and sentence order prediction."""

    use_pooler = True

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sop_classifier = SentenceOrder(config, rngs)

    def __call__(
        self, *args: Any, rngs: nn.Keys | None = None, **kwargs: Any
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns the logits of both heads."""
        outputs = self.encode(*args, rngs=rngs, **kwargs)
        pooled = self.dropout(outputs.pooler_output, rngs)
        return out.FlaxAlbertForPreTrainingOutput(
            prediction_logits=self.predictions(outputs.last_hidden_state, self.word_embeddings),
            sop_logits=self.sop_classifier.classifier(pooled),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SequenceClassification(AlbertMixin, bert.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""


class MultipleChoice(AlbertMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(AlbertMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(AlbertMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxAlbertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the ALBERT models: configuration and checkpoint names."""

    config_class = AlbertConfig
    base_model_prefix = "albert"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    }


class FlaxAlbertModel(FlaxAlbertPreTrainedModel):
    """ALBERT without a head. Returns hidden states and the pooled first token."""

    module_class = AlbertModule


class FlaxAlbertForPreTraining(FlaxAlbertPreTrainedModel):
    """ALBERT with masked language modeling and sentence order prediction heads."""

    module_class = PreTraining


class FlaxAlbertForMaskedLM(FlaxAlbertPreTrainedModel):
    """ALBERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxAlbertForSequenceClassification(FlaxAlbertPreTrainedModel):
    """ALBERT for sequence classification, from the pooled first token."""

    module_class = SequenceClassification


class FlaxAlbertForMultipleChoice(FlaxAlbertPreTrainedModel):
    """ALBERT for multiple choice."""

    module_class = MultipleChoice


class FlaxAlbertForTokenClassification(FlaxAlbertPreTrainedModel):
    """ALBERT for token classification."""

    module_class = TokenClassification


class FlaxAlbertForQuestionAnswering(FlaxAlbertPreTrainedModel):
    """ALBERT for extractive question answering."""

    module_class = QuestionAnswering
