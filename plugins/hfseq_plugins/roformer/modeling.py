"""RoFormer (Su et al., 2021): BERT with rotary instead of learned position embeddings.

Queries and keys, and values if `config.rotary_value` is set, are rotated in interleaved pairs of
features. Module attributes are named as in checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import RoFormerConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.bart.positions import StoredPositions, sinusoids
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense, embedding_size
from hfseq_plugins.electra.modeling import SequenceSummary
from hfseq_plugins.roberta import modeling as roberta


class Embeddings(nnx.Module):
    """Sum of word and token type embeddings, followed by a norm and dropout."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs):
        width, init = embedding_size(config), nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.token_type_embeddings = nn.Embed(config.type_vocab_size, width, init, rngs)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x), rngs)


class SelfAttention(nnx.Module):
    """Multi-head self-attention with rotary embeddings."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs, cross: bool = False):
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.rate, self.rotary_value = config.attention_probs_dropout_prob, config.rotary_value
        self.query, self.key, self.value = (dense(config, width, width, rngs) for _ in range(3))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        query, key = (nn.rotate(part, rotary_emb, interleaved=True) for part in (query, key))
        if self.rotary_value:
            value = nn.rotate(value, rotary_emb, interleaved=True)
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            head_mask=None if head_mask is None else head_mask[:, None, None],
            return_weights=return_weights,
        )
        return attn_output.reshape(x.shape), weights


class Attention(encoder.Attention):
    """Attention and its output projection."""

    submodule_classes = (SelfAttention, encoder.Output)


class Layer(encoder.Layer):
    """Post-norm layer: attention and feed-forward."""

    submodule_classes = (Attention, encoder.Intermediate, encoder.Output)

    def __call__(  # type: ignore[override]  # rotary embeddings instead of an encoder
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        *,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        x, weights = self.attention(x, rotary_emb, mask, rngs, head_mask, return_weights)
        return self.feed_forward(x, rngs), weights


class Encoder(encoder.Encoder):
    """The layers of the encoder.

    Attributes:
        embed_positions: The sines and cosines of a checkpoint. This attribute only exists if the
            model does not compute them.
    """

    layer_class = Layer
    embed_positions: nn.Embed


class RoFormerModule(nnx.Module):
    """RoFormer encoder without a head."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        embedding_width, width = embedding_size(config), config.hidden_size
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        self.embeddings_project = (
            nnx.data(None)
            if embedding_width == width
            else dense(config, embedding_width, width, rngs)
        )
        head_size = width // config.num_attention_heads
        self.rotary = nnx.static(nn.Rotary(config, head_size))
        if not getattr(config, "static_position_embeddings", True):
            self.encoder.embed_positions = nn.Embed(
                config.max_position_embeddings, head_size, nn.normal(config.initializer_range), rngs
            )

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings(input_ids, token_types, rngs)
        x = x if self.embeddings_project is None else self.embeddings_project(x)
        row_positions = jnp.arange(input_ids.shape[1])[None]
        positions = row_positions if segment_ids is None else nn.positions_in_segments(segment_ids)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            x,
            self.angles(positions),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=None if head_mask is None else {"head_mask": head_mask},
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )

    def angles(self, positions: jax.Array) -> Angles:
        """Returns the cosines and sines of `positions`, `(batch, length)`.

        They are either computed or read from a checkpoint, and never trained.
        """
        if not hasattr(self.encoder, "embed_positions"):
            return self.rotary(positions)
        table = jax.lax.stop_gradient(self.encoder.embed_positions(positions)[..., None, :])
        sin, cos = jnp.split(table.astype(jnp.float32), 2, axis=-1)
        return cos, sin


class RoFormerMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in RoFormer checkpoints."""

    prefix = "roformer"
    module = RoFormerModule


class MaskedLM(RoFormerMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""


class ClassificationHead(roberta.ClassificationHead):
    """Classification head on the first token, with the activation from the configuration."""

    activation = None


class SequenceClassification(RoFormerMixin, roberta.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""

    head = ClassificationHead


class TokenClassification(RoFormerMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(RoFormerMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class MultipleChoice(RoFormerMixin, bert.MultipleChoice):
    """Multiple choice, from the last token unless the configuration has another `summary_type`."""

    def __init__(self, config: RoFormerConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sequence_summary = SequenceSummary(config, rngs)

    def pool(self, outputs: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Returns the summary of each choice, `(batch * choices, hidden)`."""
        return self.sequence_summary(outputs.last_hidden_state, rngs)


class FlaxRoFormerPreTrainedModel(StoredPositions):
    """Base class of the RoFormer models: configuration, checkpoint names and call signature."""

    config_class = RoFormerConfig
    base_model_prefix = "roformer"
    position_table = "max_position_embeddings"
    weight_aliases = bert.FlaxBertPreTrainedModel.weight_aliases | {
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight"
    }
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"encoder\.embed_positions\.weight$")

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        token_type_ids: Input = None,
        head_mask: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        Token IDs and masks are `(batch, length)`, or `(batch, choices, length)` for multiple
        choice. For packed rows, `segment_ids`, `(batch, length)`, is the document number of each
        token, and 0 for padding.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "head_mask": head_mask,
            **inputs,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the sines and cosines of all positions, which PyTorch checkpoints contain."""
        config = self.config
        if not getattr(config, "static_position_embeddings", True):
            return {}
        width = config.hidden_size // config.num_attention_heads
        prefix = "" if self.module_class is RoFormerModule else "roformer."
        table = DerivedTensor(sinusoids(config.max_position_embeddings, width))
        return {f"{prefix}encoder.embed_positions.weight": table}


class FlaxRoFormerModel(FlaxRoFormerPreTrainedModel):
    """RoFormer without a head. Returns hidden states."""

    module_class = RoFormerModule


class FlaxRoFormerForMaskedLM(FlaxRoFormerPreTrainedModel):
    """RoFormer with a masked language modeling head."""

    module_class = MaskedLM


class FlaxRoFormerForSequenceClassification(FlaxRoFormerPreTrainedModel):
    """RoFormer for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxRoFormerForTokenClassification(FlaxRoFormerPreTrainedModel):
    """RoFormer for token classification."""

    module_class = TokenClassification


class FlaxRoFormerForQuestionAnswering(FlaxRoFormerPreTrainedModel):
    """RoFormer for extractive question answering."""

    module_class = QuestionAnswering


class FlaxRoFormerForMultipleChoice(FlaxRoFormerPreTrainedModel):
    """RoFormer for multiple choice, from the last token."""

    module_class = MultipleChoice
