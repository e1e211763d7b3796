"""BERT (Devlin et al., 2018) on Flax NNX; attribute names are the checkpoint's.

A sibling names its own parts in ``kinds`` and its own Linear in ``linear``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out

if TYPE_CHECKING:
    from transformers import BertConfig


def dense(config: BertConfig, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A Linear with the family's initialisation."""
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_range), rngs)


def embedding_size(config: BertConfig) -> int:
    """Return the width of the tables, which siblings may have narrower than the layers."""
    return getattr(config, "embedding_size", None) or config.hidden_size


class Embeddings(nnx.Module):
    """Word, position and token-type vectors, summed and (unless a sibling says so) normalised."""

    use_layer_norm: ClassVar[bool] = True

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, width, nn.normal(config.initializer_range), rngs)

        width = embedding_size(config)

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.LayerNorm = norm if self.use_layer_norm else nnx.data(None)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array, rngs: Keys | None):
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        x = x + self.position_embeddings(positions)
        return self.dropout(x if self.LayerNorm is None else self.LayerNorm(x), rngs)


class SelfAttention(nn.CachedAttention):
    """Attention of a sequence to itself (with a cache in decoders), or to an encoder's output."""

    linear = staticmethod(dense)

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, cross: bool = False):
        super().__init__()
        self.kv_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rate, self.cross = config.attention_probs_dropout_prob, cross
        self.causal = getattr(config, "is_decoder", False) and not cross
        width = config.hidden_size
        self.query, self.key, self.value = (
            self.linear(config, width, width, rngs) for _ in range(3)
        )

    def __call__(self, x, source, mask, rngs, head_mask=None, return_weights=False):
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
        mixed, weights = nn.attend(
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
        return mixed.reshape(x.shape), weights


class Output(nnx.Module):
    """Projection back to the residual stream, dropout, residual, norm."""

    def __init__(self, config: BertConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = dense(config, features_in, config.hidden_size, rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x: jax.Array, residual: jax.Array, rngs: Keys | None) -> jax.Array:
        return self.LayerNorm(residual + self.dropout(self.dense(x), rngs))


class Attention(nnx.Module):
    """Attention and its output projection."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (SelfAttention, Output)

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, cross: bool = False):
        mixing, output = self.submodule_classes
        self.self = mixing(config, rngs, cross)
        self.output = output(config, config.hidden_size, rngs)

    def __call__(self, x, source, mask, rngs, head_mask=None, return_weights=False):
        mixed, weights = self.self(x, source, mask, rngs, head_mask, return_weights)
        return self.output(mixed, x, rngs), weights


class Intermediate(nnx.Module):
    """The wide half of the feed-forward block."""

    linear = staticmethod(dense)

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.dense = self.linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.dense(x))


class Layer(nnx.Module):
    """Self-attention, cross-attention where the configuration asks for it, feed-forward."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (Attention, Intermediate, Output)

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        attention, intermediate, output = self.submodule_classes
        self.attention = attention(config, rngs)
        crossed = getattr(config, "add_cross_attention", False)
        self.crossattention = attention(config, rngs, cross=True) if crossed else nnx.data(None)
        self.intermediate = intermediate(config, rngs)
        self.output = output(config, config.intermediate_size, rngs)

    def __call__(
        self, x, mask, encoded, encoded_mask, *, rngs, head_mask=None, return_weights=False
    ):
        x, weights = self.attention(x, x, mask, rngs, head_mask, return_weights)
        cross_weights = None
        if encoded is not None and self.crossattention is not None:
            x, cross_weights = self.crossattention(
                x, encoded, encoded_mask, rngs, None, return_weights
            )
        return self.feed_forward(x, rngs), (weights, cross_weights)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Run the wide block on (batch, length, hidden_size)."""
        return self.output(self.intermediate(x), x, rngs)


class Encoder(nnx.Module):
    """The stack of layers."""

    layer_class: ClassVar[Any] = Layer

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(
            [self.layer_class(config, rngs) for _ in range(config.num_hidden_layers)]
        )

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Return the last hidden state for the output of the last layer: the same here."""
        return x


class Pooler(nnx.Module):
    """The first token through a tanh layer."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.dense(x[:, 0]))


class FlatPooler(nn.Linear):
    """The same without a level of its own in the checkpoint."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        super().__init__(width, width, nn.normal(config.initializer_range), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(super().__call__(x[:, 0]))


class BertModule(nnx.Module):
    """The encoder (or decoder) without a head."""

    submodule_classes: ClassVar[tuple[Any, ...]] = (Embeddings, Encoder)

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        embeddings, encoder = self.submodule_classes
        self.embeddings = embeddings(config, rngs)
        width = embedding_size(config)
        self.embeddings_project = (
            nnx.data(None)
            if width == config.hidden_size
            else dense(config, width, config.hidden_size, rngs)
        )
        self.encoder = encoder(config, rngs)
        self.pooler = Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def positions(self, input_ids: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Positions where the caller gives none: 0, 1, 2 … in every document."""
        if segment_ids is not None:
            return nn.positions_in_segments(segment_ids)
        return jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Return the last hidden state for the output of the last layer."""
        return self.encoder.finish(x)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        head_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions = self.positions(input_ids, segment_ids) if position_ids is None else position_ids
        x = self.embeddings(input_ids, types, positions, rngs)
        x = x if self.embeddings_project is None else self.embeddings_project(x)
        x, weights, inputs = nn.run_layers(
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
        crossed = output_attentions and encoder_hidden_states is not None
        return out.FlaxBaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=tuple(own for own, _ in weights) if output_attentions else None,
            cross_attentions=tuple(other for _, other in weights) if crossed else None,
        )
