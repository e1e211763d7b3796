"""BERT encoder (Devlin et al., 2018) on Flax NNX. Module attributes are named as in checkpoints.

Other families derive from these classes. They override two class attributes: `submodule_classes`
contains the classes of the submodules, and `linear` is the function that creates linear layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def dense(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Returns a linear layer with the initialization of the family."""
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_range), rngs)


def embedding_size(config: PreTrainedConfig) -> int:
    """Returns the number of features of the embeddings.

    It is smaller than the hidden size in some families (ALBERT, ELECTRA).
    """
    return getattr(config, "embedding_size", None) or config.hidden_size


class Embeddings(nnx.Module):
    """Sum of word, position and token type embeddings, followed by a norm and dropout.

    A family without the norm sets `use_layer_norm` to `False`.
    """

    use_layer_norm: ClassVar[bool] = True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, width, nn.normal(config.initializer_range), rngs)

        width = embedding_size(config)

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.LayerNorm = norm if self.use_layer_norm else nnx.data(None)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(position_ids)
        return self.dropout(x if self.LayerNorm is None else self.LayerNorm(x), rngs)


class SelfAttention(nn.CachedAttention):
    """Multi-head attention: self-attention, with a cache in decoders, or cross-attention."""

    linear = staticmethod(dense)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, cross: bool = False):
        super().__init__()
        self.kv_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rate, self.cross = config.attention_probs_dropout_prob, cross
        self.causal = getattr(config, "is_decoder", False) and not cross
        width = config.hidden_size
        self.query, self.key, self.value = (
            self.linear(config, width, width, rngs) for _ in range(3)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        heads = (*x.shape[:2], self.kv_heads, self.head_dim)
        query = self.query(x).reshape(heads)
        key, value = (
            part(source).reshape(source.shape[0], -1, *heads[2:]) for part in (self.key, self.value)
        )
        causal = self.causal
        if causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        if head_mask is not None:
            head_mask = head_mask[:, None, None]
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            head_mask=head_mask,
            return_weights=return_weights,
        )
        return attn_output.reshape(x.shape), weights


class Output(nnx.Module):
    """Projection to the hidden size, dropout, residual connection and norm."""

    def __init__(self, config: PreTrainedConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = dense(config, features_in, config.hidden_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        residual: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.LayerNorm(residual + self.dropout(self.dense(x), rngs))


class Attention(nnx.Module):
    """Attention and its output projection."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (SelfAttention, Output)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, cross: bool = False):
        attention_class, output_class = self.submodule_classes
        self.self = attention_class(config, rngs, cross)
        self.output = output_class(config, config.hidden_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.self(x, source, mask, rngs, head_mask, return_weights)
        return self.output(attn_output, x, rngs), weights


class Intermediate(nnx.Module):
    """First half of the feed-forward block: projection and activation."""

    linear = staticmethod(dense)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = self.linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.act(self.dense(x))


class Layer(nnx.Module):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (Attention, Intermediate, Output)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        attention_class, intermediate_class, output_class = self.submodule_classes
        self.attention = attention_class(config, rngs)
        add_cross_attention = getattr(config, "add_cross_attention", False)
        self.crossattention = (
            attention_class(config, rngs, cross=True) if add_cross_attention else nnx.data(None)
        )
        self.intermediate = intermediate_class(config, rngs)
        self.output = output_class(config, config.intermediate_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        encoder_hidden_states: jax.Array | None,  # (batch, source_length, hidden)
        encoder_mask: Mask,
        *,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
        x, weights = self.attention(x, x, mask, rngs, head_mask, return_weights)
        cross_weights = None
        if encoder_hidden_states is not None and self.crossattention is not None:
            x, cross_weights = self.crossattention(
                x, encoder_hidden_states, encoder_mask, rngs, None, return_weights
            )
        return self.feed_forward(x, rngs), (weights, cross_weights)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Applies the feed-forward block to `x`, `(batch, length, hidden)`."""
        return self.output(self.intermediate(x), x, rngs)


class Encoder(nnx.Module):
    """The layers of the encoder."""

    layer_class: ClassVar[Any] = Layer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(
            [self.layer_class(config, rngs) for _ in range(config.num_hidden_layers)]
        )

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer. BERT has no final norm, so this returns `x`."""
        return x


class Pooler(nnx.Module):
    """Projection of the first token with a tanh activation."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return jnp.tanh(self.dense(x[:, 0]))


class FlatPooler(nn.Linear):
    """Pooler with the name `pooler.weight` in checkpoints instead of `pooler.dense.weight`."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        super().__init__(width, width, nn.normal(config.initializer_range), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return jnp.tanh(super().__call__(x[:, 0]))


class BertModule(nnx.Module):
    """Encoder without a head. It is a decoder if `config.is_decoder` is set."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (Embeddings, Encoder)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        embeddings_class, encoder_class = self.submodule_classes
        self.embeddings = embeddings_class(config, rngs)
        width = embedding_size(config)
        self.embeddings_project = (
            nnx.data(None)
            if width == config.hidden_size
            else dense(config, width, config.hidden_size, rngs)
        )
        self.encoder = encoder_class(config, rngs)
        self.pooler = Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def positions(self, input_ids: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns the default position IDs, `(batch, length)`: 0, 1, 2, … in each document.

        Args:
            input_ids: Token IDs, `(batch, length)`.
            segment_ids: Document number of each token in packed rows, `(batch, length)`, or `None`.
        """
        if segment_ids is not None:
            return nn.positions_in_segments(segment_ids)
        return jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer, if the family has a final norm."""
        return self.encoder.apply_final_norm(x)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        encoder_hidden_states: jax.Array | None = None,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, source_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions = self.positions(input_ids, segment_ids) if position_ids is None else position_ids
        x = self.embeddings(input_ids, token_types, positions, rngs)
        return self.run_encoder(
            x,
            attention_mask,
            head_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def run_encoder(
        self,
        x: jax.Array,  # (batch, length, embedding_size)
        attention_mask: jax.Array | None,  # (batch, length)
        head_mask: jax.Array | None,  # (layers, heads)
        encoder_hidden_states: jax.Array | None,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None,  # (batch, source_length)
        segment_ids: jax.Array | None,  # (batch, length)
        *,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> out.FlaxModelOutput:
        """Runs the layers and the pooler on the embeddings `x`."""
        x = x if self.embeddings_project is None else self.embeddings_project(x)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            x,
            nn.visible(attention_mask, segment_ids),
            encoder_hidden_states,
            nn.visible(encoder_attention_mask),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=None if head_mask is None else {"head_mask": head_mask},
        )
        x = self.apply_final_norm(x)
        has_cross = output_attentions and encoder_hidden_states is not None
        return out.FlaxBaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=tuple(weights for weights, _ in attentions) if output_attentions else None,
            cross_attentions=tuple(weights for _, weights in attentions) if has_cross else None,
        )
