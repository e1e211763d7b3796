"""MobileBERT (Sun et al., 2020) on Flax NNX. Module attributes are named as in checkpoints.

Attention and feed-forward blocks have fewer features than the hidden states. Bottlenecks project
the hidden states to this smaller size at the start of a layer, and back at its end. The embedding
of a token is computed from the token and its two neighbors.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import MobileBertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import Pooler, dense
from hfseq_plugins.bert.sharding import RULES as BERT_RULES

RULES = [
    (r"bottleneck/((input|attention)/)?dense/kernel$", "table"),
    (r"embedding_transformation/kernel$", "table"),
    (r"embedding_transformation/bias$", "vector"),
    (r"predictions/dense/kernel$", "embedding"),
    *BERT_RULES,
]
#: PyTorch's default epsilon, which applies to norms for which the model does not set an epsilon.
DEFAULT_EPSILON = 1e-5


class NoNorm(nnx.Module):
    """Replacement for a norm that only multiplies by a scale and adds a bias per feature."""

    def __init__(self, features: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:  # (..., features)
        return nn.add_bias(x * self.scale[...].astype(x.dtype), self.bias[...])


NORMS = {"layer_norm": nn.LayerNorm, "no_norm": NoNorm}


def norm(config: MobileBertConfig, features: int, epsilon: float | None = None) -> nnx.Module:
    """Returns the norm that the configuration selects."""
    if config.normalization_type not in NORMS:
        raise UsageError(
            f"unknown normalization_type='{config.normalization_type}' in the configuration "
            f"(supported: {', '.join(NORMS)})"
        )
    return NORMS[config.normalization_type](features, epsilon or config.layer_norm_eps)


def inner_size(config: MobileBertConfig) -> int:
    """Returns the number of input and output features of attention and feed-forward blocks."""
    return config.intra_bottleneck_size if config.use_bottleneck else config.hidden_size


class Embeddings(nnx.Module):
    """Sum of word, position and token type embeddings, followed by a norm and dropout.

    With `config.trigram_input`, the word embeddings of a token and its two neighbors are projected
    to the hidden size.
    """

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        def table(size: int, features: int) -> nn.Embed:
            return nn.Embed(size, features, nn.normal(config.initializer_range), rngs)

        width, hidden = config.embedding_size, config.hidden_size
        self.trigrams = config.trigram_input
        self.word_embeddings = table(config.vocab_size, width)
        self.position_embeddings = table(config.max_position_embeddings, hidden)
        self.token_type_embeddings = table(config.type_vocab_size, hidden)
        self.embedding_transformation = dense(
            config, 3 * width if self.trigrams else width, hidden, rngs
        )
        self.transform = self.trigrams or width != hidden
        self.LayerNorm = norm(config, hidden, DEFAULT_EPSILON)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        segment_ids: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids)
        if self.trigrams:
            x = self.add_neighbors(x, segment_ids)
        if self.transform:
            x = self.embedding_transformation(x)
        x = x + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x), rngs)

    @staticmethod
    def add_neighbors(
        x: jax.Array,  # (batch, length, features)
        segment_ids: jax.Array | None,  # (batch, length)
    ) -> jax.Array:
        """Concatenates the vectors of the next token, the token itself and the previous token.

        A vector is zero if the row has no such neighbor, or if the neighbor is in another document
        of a packed row. As in PyTorch, padding counts as a token.

        Returns:
            `(batch, length, 3 * features)`.
        """
        following = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
        previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        if segment_ids is not None:
            is_same = (segment_ids[:, 1:] == segment_ids[:, :-1])[..., None]
            following = jnp.where(jnp.pad(is_same, ((0, 0), (0, 1), (0, 0))), following, 0)
            previous = jnp.where(jnp.pad(is_same, ((0, 0), (1, 0), (0, 0))), previous, 0)
        return jnp.concatenate([following, x, previous], -1)


class SelfAttention(nnx.Module):
    """Multi-head self-attention. Values may be computed from other inputs than queries and keys."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        width = inner_size(config)
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key = (dense(config, width, width, rngs) for _ in range(2))
        value_inputs = width if config.use_bottleneck_attention else config.hidden_size
        self.value = dense(config, value_inputs, width, rngs)

    def __call__(
        self,
        query_input: jax.Array,  # (batch, length, inner)
        key_input: jax.Array,  # (batch, length, inner)
        value_input: jax.Array,  # (batch, length, hidden or inner)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            x.reshape(*x.shape[:2], self.heads, -1)
            for x in (self.query(query_input), self.key(key_input), self.value(value_input))
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return attn_output.reshape(*query_input.shape[:2], -1), weights


class Projection(nnx.Module):
    """Projection, dropout, residual connection and norm.

    The residual connection is omitted if no residual is passed.

    Args:
        config: The configuration.
        features_in: Number of input features.
        features_out: Number of output features.
        rngs: Random number generators for the initial values.
        dropout_rate: Dropout rate of the projection's output.
        epsilon: Epsilon of the norm. Default: `layer_norm_eps` of the configuration.
    """

    def __init__(
        self,
        config: MobileBertConfig,
        features_in: int,
        features_out: int,
        rngs: nnx.Rngs,
        dropout_rate: float = 0.0,
        epsilon: float | None = None,
    ):
        self.dense = dense(config, features_in, features_out, rngs)
        self.LayerNorm: Any = norm(config, features_out, epsilon)
        self.dropout = nn.Dropout(dropout_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, features_in)
        residual: jax.Array | None = None,  # (batch, length, features_out)
        rngs: Keys | None = None,
    ) -> jax.Array:
        x = self.dropout(self.dense(x), rngs)
        return self.LayerNorm(x if residual is None else x + residual)


class Attention(nnx.Module):
    """Attention and its output projection."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        width = inner_size(config)
        rate = 0.0 if config.use_bottleneck else config.hidden_dropout_prob
        self.self = SelfAttention(config, rngs)
        self.output = Projection(config, width, width, rngs, rate)


class Intermediate(nnx.Module):
    """First half of a feed-forward block: projection and activation."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        self.dense = dense(config, inner_size(config), config.intermediate_size, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, inner)
        return self.act(self.dense(x))


class FeedForward(nnx.Module):
    """Feed-forward block with residual connection and norm."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        self.intermediate = Intermediate(config, rngs)
        self.output = Projection(config, config.intermediate_size, inner_size(config), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, inner)
        return self.output(self.intermediate(x), x)


class Bottleneck(nnx.Module):
    """Projects the hidden states to the smaller size that attention and feed-forward blocks use."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        sizes = config.hidden_size, inner_size(config)
        self.all_share = config.use_bottleneck_attention
        shared = config.key_query_shared_bottleneck
        if not (self.all_share or shared) and sizes[0] != sizes[1]:
            raise UsageError(
                f"without use_bottleneck_attention and key_query_shared_bottleneck, queries and "
                f"keys are computed from the hidden states, but intra_bottleneck_size={sizes[1]} "
                f"in the configuration differs from hidden_size={sizes[0]}. Enable one of the two "
                f"options or make the sizes equal."
            )
        self.input = Projection(config, *sizes, rngs)
        self.attention = Projection(config, *sizes, rngs) if shared else nnx.data(None)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns the inputs of queries, keys and values, and of the residual connection."""
        residual = self.input(x)
        if self.all_share:
            return residual, residual, residual, residual
        if self.attention is None:
            return x, x, x, residual
        shared = self.attention(x)
        return shared, shared, x, residual


class Output(Projection):
    """Second half of the last feed-forward block, and the projection back to the hidden size."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        width, rate = inner_size(config), config.hidden_dropout_prob
        bottleneck = config.use_bottleneck
        super().__init__(
            config,
            config.intermediate_size,
            width,
            rngs,
            0.0 if bottleneck else rate,
            DEFAULT_EPSILON,
        )
        self.bottleneck = (
            Projection(config, width, config.hidden_size, rngs, rate)
            if bottleneck
            else nnx.data(None)
        )


class Layer(nnx.Module):
    """Attention and several feed-forward blocks, between bottlenecks."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.intermediate, self.output = Intermediate(config, rngs), Output(config, rngs)
        self.bottleneck = Bottleneck(config, rngs) if config.use_bottleneck else nnx.data(None)
        extra_blocks = config.num_feedforward_networks - 1
        self.ffn = nnx.List([FeedForward(config, rngs) for _ in range(extra_blocks)])

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        inputs = (x, x, x, x) if self.bottleneck is None else self.bottleneck(x)
        h, weights = self.attention.self(*inputs[:3], mask, rngs, return_weights)
        h = self.attention.output(h, inputs[3], rngs)
        for block in self.ffn:
            h = block(h)
        h = self.output(self.intermediate(h), h, rngs)
        if self.output.bottleneck is not None:
            h = self.output.bottleneck(h, x, rngs)
        return h, weights


class MobileBertModule(nnx.Module):
    """MobileBERT encoder without a head."""

    def __init__(self, config: MobileBertConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings = Embeddings(config, rngs)
        layers = [Layer(config, rngs) for _ in range(config.num_hidden_layers)]
        self.encoder = nnx.Dict(layer=nn.Layers(layers))
        self.has_pooler = add_pooling_layer
        has_projection = add_pooling_layer and config.classifier_activation
        self.pooler = Pooler(config, rngs) if has_projection else nnx.data(None)

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
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        if position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
            if segment_ids is not None:
                position_ids = nn.positions_in_segments(segment_ids)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder["layer"],
            self.embeddings(input_ids, token_types, position_ids, segment_ids, rngs),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=self.pool(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )

    def pool(self, x: jax.Array) -> jax.Array | None:
        """Returns the hidden state of the first token, `(batch, hidden)`.

        If `config.classifier_activation` is set, a projection and tanh are applied to it.
        """
        if not self.has_pooler:
            return None
        return x[:, 0] if self.pooler is None else self.pooler(x)


class MobileBertMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in MobileBERT checkpoints."""

    prefix = "mobilebert"
    module = MobileBertModule


class Predictions(bert.VocabularyHead):
    """Language modeling head.

    The word embeddings have fewer features than the hidden states. They project the first features
    of a hidden state to the vocabulary, and `dense` projects the remaining features.
    """

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary, and its part `dense`."""
        width, self.width = config.hidden_size, config.embedding_size
        norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.transform = nnx.Dict(dense=dense(config, width, width, rngs), LayerNorm=norm)
        self.act = nn.activation(config.hidden_act)
        # The checkpoint contains this kernel as (features, vocab_size).
        self.dense = nn.Conv1D(
            width - self.width,
            config.vocab_size,
            nn.normal(config.initializer_range),
            rngs,
            use_bias=False,
        )

    def __call__(
        self,
        x: jax.Array,  # (..., hidden)
        embeddings: nn.Embed,
    ) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        x = self.transform["LayerNorm"](self.act(self.transform["dense"](x)))
        first, last = x[..., : self.width], x[..., self.width :]
        logits = embeddings.attend(first) if self.decoder is None else self.decoder(first)
        if last.shape[-1]:  # zero if the embeddings are as wide as the hidden states
            logits = logits + self.dense(last)
        return nn.add_bias(logits, self.bias[...])


class PreTrainingHeads(bert.PreTrainingHeads):
    """Heads for masked language modeling and next sentence prediction."""

    predictions_class = Predictions


class PreTraining(MobileBertMixin, bert.PreTraining):
    """Masked language modeling and next sentence prediction."""

    heads_class = PreTrainingHeads


class MaskedLM(MobileBertMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""

    heads_class = PreTrainingHeads


class NextSentencePrediction(MobileBertMixin, bert.NextSentencePrediction):
    """Encoder with a head for next sentence prediction."""


class SequenceClassification(MobileBertMixin, bert.SequenceClassification):
    """Sequence classification or regression."""


class MultipleChoice(MobileBertMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(MobileBertMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(MobileBertMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxMobileBertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the MobileBERT models: configuration and checkpoint names.

    `input_ids`, `attention_mask`, `token_type_ids` and `position_ids` are `(batch, length)`, or
    `(batch, choices, length)` for multiple choice. If rows contain several packed documents,
    `segment_ids`, `(batch, length)`, contains the document number of each token, and 0 for padding.
    """

    config_class: ClassVar[Any] = MobileBertConfig
    base_model_prefix = "mobilebert"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "cls.predictions.decoder.weight": "mobilebert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


class FlaxMobileBertModel(FlaxMobileBertPreTrainedModel):
    """MobileBERT without a head. Returns hidden states and the pooled first token."""

    module_class = MobileBertModule


class FlaxMobileBertForPreTraining(FlaxMobileBertPreTrainedModel):
    """MobileBERT with masked language modeling and next sentence prediction heads."""

    module_class = PreTraining


class FlaxMobileBertForMaskedLM(FlaxMobileBertPreTrainedModel):
    """MobileBERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxMobileBertForNextSentencePrediction(FlaxMobileBertPreTrainedModel):
    """MobileBERT with a next sentence prediction head."""

    module_class = NextSentencePrediction


class FlaxMobileBertForSequenceClassification(FlaxMobileBertPreTrainedModel):
    """MobileBERT for sequence classification, from the pooled first token."""

    module_class = SequenceClassification


class FlaxMobileBertForMultipleChoice(FlaxMobileBertPreTrainedModel):
    """MobileBERT for multiple choice."""

    module_class = MultipleChoice


class FlaxMobileBertForTokenClassification(FlaxMobileBertPreTrainedModel):
    """MobileBERT for token classification."""

    module_class = TokenClassification


class FlaxMobileBertForQuestionAnswering(FlaxMobileBertPreTrainedModel):
    """MobileBERT for extractive question answering."""

    module_class = QuestionAnswering
