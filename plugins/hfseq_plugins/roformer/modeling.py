"""RoFormer (Su et al., 2021): BERT with rotary positions in place of a table.

Neighbouring numbers of queries and keys (and of values, with ``rotary_value``) are turned together.
Attribute names are the checkpoint's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import RoFormerConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bart.positions import sinusoids
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense, embedding_size
from hfseq_plugins.roberta import modeling as roberta


class Embeddings(nnx.Module):
    """Word and token-type vectors, summed and normalised."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs):
        width, init = embedding_size(config), nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.token_type_embeddings = nn.Embed(config.type_vocab_size, width, init, rngs)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, ids: jax.Array, types: jax.Array, rngs: Keys | None) -> jax.Array:
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(x), rngs)


class SelfAttention(nnx.Module):
    """Attention of a sequence to itself, turned by position."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs, cross: bool = False):
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.rate, self.rotary_value = config.attention_probs_dropout_prob, config.rotary_value
        self.query, self.key, self.value = (dense(config, width, width, rngs) for _ in range(3))

    def __call__(self, x, angles, mask, rngs, head_mask=None, return_weights=False):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        query, key = (nn.rotate(part, angles, interleaved=True) for part in (query, key))
        if self.rotary_value:
            value = nn.rotate(value, angles, interleaved=True)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            head_mask=None if head_mask is None else head_mask[:, None, None],
            return_weights=return_weights,
        )
        return mixed.reshape(x.shape), weights


class Attention(encoder.Attention):
    """Attention and its output projection."""

    submodule_classes = (SelfAttention, encoder.Output)


class Layer(encoder.Layer):
    """Self-attention and feed-forward."""

    submodule_classes = (Attention, encoder.Intermediate, encoder.Output)

    def __call__(self, x, angles, mask, *, rngs, head_mask=None, return_weights=False):
        x, weights = self.attention(x, angles, mask, rngs, head_mask, return_weights)
        return self.feed_forward(x, rngs), weights


class Encoder(encoder.Encoder):
    """The stack of layers."""

    layer_class = Layer


class RoFormerModule(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        narrow, width = embedding_size(config), config.hidden_size
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        self.embeddings_project = (
            nnx.data(None) if narrow == width else dense(config, narrow, width, rngs)
        )
        self.rotary = nnx.static(nn.Rotary(config, width // config.num_attention_heads))

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        head_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings(input_ids, types, rngs)
        x = x if self.embeddings_project is None else self.embeddings_project(x)
        whole = jnp.arange(input_ids.shape[1])[None]
        positions = whole if segment_ids is None else nn.positions_in_segments(segment_ids)
        x, weights, inputs = nn.run_layers(
            self.encoder.layer,
            x,
            self.rotary(positions),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=None if head_mask is None else {"head_mask": head_mask},
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class RoFormerMixin:
    """RoFormer's encoder under its checkpoint name."""

    prefix, module = "roformer", RoFormerModule


class MaskedLM(RoFormerMixin, bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class ClassificationHead(roberta.ClassificationHead):
    """The first token through a layer with the configuration's activation, then the labels."""

    activation = None


class SequenceClassification(RoFormerMixin, roberta.SequenceClassification):
    """A label (or a number) for the whole sequence."""

    head = ClassificationHead


class TokenClassification(RoFormerMixin, bert.TokenClassification):
    """A label for every token."""


class QuestionAnswering(RoFormerMixin, bert.QuestionAnswering):
    """The first and the last token of the answer."""


class MultipleChoice(RoFormerMixin, bert.MultipleChoice):
    """One of several continuations, by their last token."""

    def pool(self, encoded: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Return the last token of each choice."""
        return encoded.last_hidden_state[:, -1]


class FlaxRoFormerPreTrainedModel(FlaxPreTrainedModel):
    """Base of the RoFormer classes: configuration, checkpoint names and the call of v4."""

    config_class = RoFormerConfig
    base_model_prefix = "roformer"
    position_table = "max_position_embeddings"
    weight_aliases = bert.FlaxBertPreTrainedModel.weight_aliases | {
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight"
    }
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"encoder\.embed_positions\.weight$")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        head_mask=None,
        params=None,
        dropout_rng: jax.Array | Keys | None = None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` and the masks are (batch, length), or (batch, choices, length) for multiple
        choice. ``segment_ids`` (batch, length) numbers the documents of packed rows.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "head_mask": head_mask,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return the table of angles, which PyTorch keeps in its checkpoints."""
        config = self.config
        width = config.hidden_size // config.num_attention_heads
        prefix = "" if self.module_class is RoFormerModule else "roformer."
        table = DerivedTensor(sinusoids(config.max_position_embeddings, width))
        return {f"{prefix}encoder.embed_positions.weight": table}


class FlaxRoFormerModel(FlaxRoFormerPreTrainedModel):
    """RoFormer without a head: hidden states."""

    module_class = RoFormerModule


class FlaxRoFormerForMaskedLM(FlaxRoFormerPreTrainedModel):
    """RoFormer with the masked-LM head."""

    module_class = MaskedLM


class FlaxRoFormerForSequenceClassification(FlaxRoFormerPreTrainedModel):
    """RoFormer with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxRoFormerForTokenClassification(FlaxRoFormerPreTrainedModel):
    """RoFormer with a classifier on every token."""

    module_class = TokenClassification


class FlaxRoFormerForQuestionAnswering(FlaxRoFormerPreTrainedModel):
    """RoFormer that marks the span of an answer."""

    module_class = QuestionAnswering


class FlaxRoFormerForMultipleChoice(FlaxRoFormerPreTrainedModel):
    """RoFormer that scores continuations by their last token."""

    module_class = MultipleChoice
