"""The layers of BART (Lewis et al., 2019) on Flax NNX; attribute names are the checkpoint's.

A sibling of the family names other parts in subclasses: ``norm_first`` says where norms stand,
``Side.positions`` which vectors places have, ``Side.embedding_norm`` whether embeddings are
normalised and ``Side.places_first`` whether with their places, ``DecoderLayer.sizes`` and
``crossed`` what a decoder's configuration calls its sizes, ``Layer.attention`` and ``dense`` what
layers are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import Keys
from hfseq.nn import outputs as out

if TYPE_CHECKING:
    from transformers import BartConfig

EPSILON = 1e-5


def dense(config: BartConfig, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A Linear with the family's initialisation."""
    return nn.Linear(features_in, features_out, nn.normal(config.init_std), rngs)


def token_embedding(config: BartConfig, rngs: nnx.Rngs, size: int | None = None) -> nn.Embed:
    """Vectors of the vocabulary, or of one of another ``size``."""
    size = config.vocab_size if size is None else size
    return nn.Embed(size, config.d_model, nn.normal(config.init_std), rngs)


class LearnedPositions(nn.Embed):
    """Vectors of places; the first two rows of the table are kept free, as fairseq did."""

    offset: ClassVar[int] = 2

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        size = config.max_position_embeddings + self.offset
        super().__init__(size, config.d_model, nn.normal(config.init_std), rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the vectors of places 0, 1, 2 …: (...) to (..., features)."""
        return super().__call__(ids + self.offset)


class LayerDrop(nn.Dropout):
    """Skip whole layers (Fan et al., 2019, https://arxiv.org/abs/1909.11556), row by row."""

    def __call__(self, new: jax.Array, old: jax.Array, rngs: Keys | None) -> jax.Array:  # type: ignore[override]
        """Return ``new``, or ``old`` in the rows where the layer is skipped."""
        if rngs is None or not self.rate:
            return new
        drawn = rngs.bits((new.shape[0], 1, 1))
        return jnp.where(drawn < jnp.uint32(round(self.rate * 65536)), old, new)


class Attention(nn.CachedAttention):
    """Attention of a sequence to itself (with a cache in decoders), or to an encoder's output."""

    dense: ClassVar[Callable[..., nn.Linear]] = staticmethod(dense)

    def __init__(
        self,
        config: BartConfig,
        heads: int,
        rngs: nnx.Rngs,
        causal: bool = False,
        cross: bool = False,
    ):
        super().__init__()
        width, inner = config.d_model, self.inner_width(config)
        if inner % heads:
            name = "d_model" if inner == width else "qkv_dim"
            raise UsageError(f"{name}={inner} is not a multiple of the {heads} attention heads")
        self.kv_heads, self.head_dim = heads, inner // heads
        self.causal, self.cross, self.rate = causal, cross, config.attention_dropout
        self.q_proj, self.k_proj, self.v_proj = (
            self.dense(config, width, inner, rngs) for _ in range(3)
        )
        self.out_proj = self.dense(config, inner, width, rngs)

    @staticmethod
    def inner_width(config: BartConfig) -> int:
        """Return the width of all heads together."""
        return config.d_model

    def __call__(self, x, source, mask, rngs, return_weights=False, **own):
        def heads(part: nn.Linear, states: jax.Array) -> jax.Array:
            return part(states).reshape(*states.shape[:2], self.kv_heads, self.head_dim)

        def make() -> tuple[jax.Array, jax.Array]:
            return heads(self.k_proj, source), heads(self.v_proj, source)

        key, value = nn.encoder_cache(self, make) if self.cross else make()
        causal = self.causal
        if causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        mixed, weights = self.compute_attention(
            heads(self.q_proj, x),
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
            **own,
        )
        return self.out_proj(mixed.reshape(*x.shape[:2], -1)), weights

    def compute_attention(self, query, key, value, **options):
        """Mix the values: (batch, queries, heads, head_dim) and, if asked for, the weights."""
        return nn.attend(query, key, value, **options)


class Layer(nnx.Module):
    """What the layers of both sides share: the feed-forward block and where norms stand."""

    norm_first: bool = False
    attention: ClassVar[Callable[..., Attention]] = Attention
    dense: ClassVar[Callable[..., nn.Linear]] = staticmethod(dense)

    def __init__(self, config: BartConfig, inner: int, layerdrop: float, rngs: nnx.Rngs):
        width = config.d_model
        self.self_attn_layer_norm = nn.LayerNorm(width, EPSILON)
        self.fc1 = self.dense(config, width, inner, rngs)
        self.fc2 = self.dense(config, inner, width, rngs)
        self.final_layer_norm = nn.LayerNorm(width, EPSILON)
        self.act = nn.activation(config.activation_function)
        self.dropout, self.act_dropout = (
            nn.Dropout(rate) for rate in (config.dropout, config.activation_dropout)
        )
        self.layerdrop = LayerDrop(layerdrop)

    def residual_block(
        self, norm: nn.LayerNorm, block: Callable[[jax.Array], Any], x: jax.Array, rngs: Keys | None
    ) -> tuple[jax.Array, Any]:
        """Run ``block`` with dropout and residual, the norm after it or before it."""
        y, weights = block(norm(x) if self.norm_first else x)
        x = x + self.dropout(y, rngs)
        return (x if self.norm_first else norm(x)), weights

    def attend(self, name: str, x, source, mask, rngs, return_weights, **own):
        """Run the attention ``name`` to ``source``, or of ``x`` to itself."""
        attention, norm = getattr(self, name), getattr(self, f"{name}_layer_norm")

        def block(y: jax.Array) -> Any:
            read = y if source is None else source
            return attention(y, read, mask, rngs, return_weights, **own)

        return self.residual_block(norm, block, x, rngs)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Run the two dense layers."""

        def block(y: jax.Array) -> tuple[jax.Array, None]:
            return self.fc2(self.act_dropout(self.act(self.fc1(y)), rngs)), None

        return self.residual_block(self.final_layer_norm, block, x, rngs)[0]


class EncoderLayer(Layer):
    """Self-attention and feed-forward."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        super().__init__(config, config.encoder_ffn_dim, config.encoder_layerdrop, rngs)
        self.self_attn = self.attention(config, config.encoder_attention_heads, rngs)

    def __call__(self, x, mask, *, rngs, return_weights=False, **own):
        y, weights = self.attend("self_attn", x, None, mask, rngs, return_weights, **own)
        return self.layerdrop(self.feed_forward(y, rngs), x, rngs), weights


class DecoderLayer(Layer):
    """Causal self-attention, attention to the encoder's output (if there is one), feed-forward."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        heads, inner, layerdrop = self.layer_sizes(config)
        super().__init__(config, inner, layerdrop, rngs)
        self.self_attn = self.attention(config, heads, rngs, causal=True)
        crossed = self.has_cross_attention(config)
        across = self.attention(config, heads, rngs, cross=True) if crossed else nnx.data(None)
        norm = nn.LayerNorm(config.d_model, EPSILON) if crossed else nnx.data(None)
        self.encoder_attn, self.encoder_attn_layer_norm = across, norm

    @staticmethod
    def layer_sizes(config: BartConfig) -> tuple[int, int, float]:
        """Return the heads, the width of the feed-forward block, and how often it is skipped."""
        return config.decoder_attention_heads, config.decoder_ffn_dim, config.decoder_layerdrop

    @staticmethod
    def has_cross_attention(config: BartConfig) -> bool:
        """Tell whether there is attention to an encoder's output."""
        return True

    def __call__(self, x, mask, encoded, encoded_mask, *, rngs, return_weights=False, **own):
        y, weights = self.attend("self_attn", x, None, mask, rngs, return_weights, **own)
        crossed = None
        if encoded is not None:
            y, crossed = self.attend(
                "encoder_attn", y, encoded, encoded_mask, rngs, return_weights, **own
            )
        return self.layerdrop(self.feed_forward(y, rngs), x, rngs), (weights, crossed)


class Stack(nnx.Module):
    """What encoder and decoder share: embeddings, a stack of layers, norms before and after it."""

    layer: ClassVar[type[Layer]]
    positions: ClassVar[Callable[..., Any]] = LearnedPositions
    token_embedding: ClassVar[Callable[..., nn.Embed]] = staticmethod(token_embedding)
    embedding_norm: bool = True
    norm_after_positions: bool = True
    norm_first: bool = False

    def __init__(
        self,
        config: BartConfig,
        depth: int,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        size: int | None = None,
    ):
        own = self.token_embedding(config, rngs, size) if own_token_embedding else nnx.data(None)
        self.embed_tokens = own
        self.embed_positions = self.positions(config, rngs)
        self.layers = nn.Layers([self.layer(config, rngs) for _ in range(depth)])
        norms = {"layernorm_embedding": self.embedding_norm, "layer_norm": self.norm_first}
        for name, wanted in norms.items():
            setattr(self, name, nn.LayerNorm(config.d_model, EPSILON) if wanted else nnx.data(None))
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    def per_layer(self) -> dict[str, jax.Array] | None:
        """Return keyword arguments of which every layer gets its own; mostly none."""
        return None

    def run(self, x: jax.Array, *args: Any, **options: Any):
        """Run the layers and the norm behind them; see :func:`hfseq.nn.run_layers`."""
        x, weights, inputs = nn.run_layers(
            self.layers, x, *args, per_layer=self.per_layer(), **options
        )
        return x if self.layer_norm is None else self.layer_norm(x), weights, inputs

    def embed(self, shared, ids, positions, segments, rngs):
        """Tokens and places; where none are given these are 0, 1, 2 … in every document."""
        if positions is None:
            whole = jnp.arange(ids.shape[1])[None]
            positions = whole if segments is None else nn.positions_in_segments(segments)
        table = shared if self.embed_tokens is None else self.embed_tokens
        x, norm = table(ids) * self.scale, self.layernorm_embedding
        places = self.embed_positions(positions)
        if norm is None:
            x = x + places
        else:
            x = norm(x + places) if self.norm_after_positions else norm(x) + places
        return self.dropout(x, rngs)


class Encoder(Stack):
    """The encoder."""

    layer = EncoderLayer

    def __init__(self, config: BartConfig, rngs: nnx.Rngs, own_token_embedding: bool):
        super().__init__(config, config.encoder_layers, rngs, own_token_embedding)

    def __call__(
        self,
        shared,
        ids,
        mask,
        positions,
        segments,
        *,
        rngs,
        output_attentions,
        output_hidden_states,
    ):
        x, weights, inputs = self.run(
            self.embed(shared, ids, positions, segments, rngs),
            nn.visible(mask, segments),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class Decoder(Stack):
    """The decoder."""

    layer = DecoderLayer

    def __init__(
        self,
        config: BartConfig,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        size: int | None = None,
        depth: int | None = None,
    ):
        depth = config.decoder_layers if depth is None else depth
        super().__init__(config, depth, rngs, own_token_embedding, size)

    def __call__(
        self,
        shared,
        ids,
        mask,
        encoded,
        encoded_mask,
        positions,
        segments,
        *,
        rngs,
        output_attentions,
        output_hidden_states,
    ):
        x, weights, inputs = self.run(
            self.embed(shared, ids, positions, segments, rngs),
            nn.visible(mask, segments),
            encoded,
            encoded_mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        crossed = output_attentions and encoded is not None
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=tuple(own for own, _ in weights) if output_attentions else None,
            cross_attentions=tuple(other for _, other in weights) if crossed else None,
        )
