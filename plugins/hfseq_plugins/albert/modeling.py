"""ALBERT (Lan et al., 2019): a BERT whose layers share their parameters, with narrow tables.

Layer i runs the group i * groups // layers. Attribute names are the checkpoint's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import AlbertConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import Embeddings, FlatPooler, SelfAttention, dense


class Attention(SelfAttention):
    """Attention, projection, residual and norm, on one level."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x, mask, rngs, return_weights=False):
        mixed, weights = super().__call__(x, x, mask, rngs, return_weights=return_weights)
        return self.LayerNorm(x + self.dropout(self.dense(mixed), rngs)), weights


class Layer(nnx.Module):
    """Attention and feed-forward, a norm after each."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.full_layer_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.ffn = dense(config, width, config.intermediate_size, rngs)
        self.ffn_output = dense(config, config.intermediate_size, width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x, mask, rngs, return_weights=False):
        x, weights = self.attention(x, mask, rngs, return_weights)
        return self.full_layer_layer_norm(x + self.ffn_output(self.act(self.ffn(x)))), weights


class LayerGroup(nnx.Module):
    """Layers that always run together; mostly one."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.albert_layers = nnx.List([Layer(config, rngs) for _ in range(config.inner_group_num)])

    def __call__(self, x, mask, *, rngs, return_weights=False):
        weights = ()
        for layer in self.albert_layers:
            x, own = layer(x, mask, rngs, return_weights)
            weights += (own,)
        return x, weights


class Encoder(nnx.Module):
    """From the tables' width to that of the layers, and the groups of layers."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.embedding_hidden_mapping_in = dense(
            config, config.embedding_size, config.hidden_size, rngs
        )
        groups, layers = config.num_hidden_groups, config.num_hidden_layers
        self.albert_layer_groups = nn.Layers([LayerGroup(config, rngs) for _ in range(groups)])
        self.order = tuple(i * groups // layers for i in range(layers))


class AlbertModule(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        self.pooler = FlatPooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None:
            whole = jnp.arange(input_ids.shape[1])[None]
            position_ids = whole if segment_ids is None else nn.positions_in_segments(segment_ids)
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings(input_ids, types, position_ids, rngs)
        x, weights, inputs = nn.run_layers(
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
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=sum(weights, ()) if output_attentions else None,
        )


class Predictions(bert.VocabularyHead):
    """Dense, activation and norm, then the vocabulary."""

    def add_transform(self, config: AlbertConfig, rngs: nnx.Rngs) -> None:
        """Make what comes before the vocabulary."""
        self.dense = dense(config, config.hidden_size, config.embedding_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.embedding_size, config.layer_norm_eps)
        self.act = nn.activation(config.hidden_act)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Map hidden states to what the vocabulary is multiplied with."""
        return self.LayerNorm(self.act(self.dense(x)))


class AlbertMixin:
    """ALBERT's encoder, and its head over the vocabulary, under their checkpoint names."""

    prefix, module, classifier_dropout_field = "albert", AlbertModule, "classifier_dropout_prob"

    def add_head(self, config: AlbertConfig, rngs: nnx.Rngs) -> None:
        """Make the head over the vocabulary."""
        self.predictions = Predictions(config, rngs)

    @property
    def vocabulary_head(self) -> Predictions:
        """The head over the vocabulary."""
        return self.predictions


class MaskedLM(AlbertMixin, bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class SentenceOrder(nnx.Module):
    """Do two sentences stand in their order?"""

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        self.classifier = dense(config, config.hidden_size, config.num_labels, rngs)


class PreTraining(AlbertMixin, bert.LanguageModel):
    """Masked language modelling and the order of sentences together."""

    use_pooler = True

    def __init__(self, config: AlbertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sop_classifier = SentenceOrder(config, rngs)

    def __call__(self, *args: Any, rngs: nn.Keys | None = None, **kwargs: Any):
        encoded = self.encode(*args, rngs=rngs, **kwargs)
        pooled = self.dropout(encoded.pooler_output, rngs)
        return out.FlaxAlbertForPreTrainingOutput(
            prediction_logits=self.predictions(encoded.last_hidden_state, self.word_embeddings),
            sop_logits=self.sop_classifier.classifier(pooled),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


class SequenceClassification(AlbertMixin, bert.SequenceClassification):
    """A label (or a number) for the whole sequence."""


class MultipleChoice(AlbertMixin, bert.MultipleChoice):
    """One of several continuations."""


class TokenClassification(AlbertMixin, bert.TokenClassification):
    """A label for every token."""


class QuestionAnswering(AlbertMixin, bert.QuestionAnswering):
    """The first and the last token of the answer."""


class FlaxAlbertPreTrainedModel(FlaxPreTrainedModel):
    """Base of the ALBERT classes: configuration and checkpoint names."""

    config_class = AlbertConfig
    base_model_prefix = "albert"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    }


class FlaxAlbertModel(FlaxAlbertPreTrainedModel):
    """ALBERT without a head: hidden states and the pooled first token."""

    module_class = AlbertModule


class FlaxAlbertForPreTraining(FlaxAlbertPreTrainedModel):
    """ALBERT with the masked-LM head and the one for the order of sentences."""

    module_class = PreTraining


class FlaxAlbertForMaskedLM(FlaxAlbertPreTrainedModel):
    """ALBERT with the masked-LM head."""

    module_class = MaskedLM


class FlaxAlbertForSequenceClassification(FlaxAlbertPreTrainedModel):
    """ALBERT with a classifier on the pooled first token."""

    module_class = SequenceClassification


class FlaxAlbertForMultipleChoice(FlaxAlbertPreTrainedModel):
    """ALBERT that scores continuations."""

    module_class = MultipleChoice


class FlaxAlbertForTokenClassification(FlaxAlbertPreTrainedModel):
    """ALBERT with a classifier on every token."""

    module_class = TokenClassification


class FlaxAlbertForQuestionAnswering(FlaxAlbertPreTrainedModel):
    """ALBERT that marks the span of an answer."""

    module_class = QuestionAnswering
