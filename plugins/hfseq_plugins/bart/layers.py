"""Layers of BART (Lewis et al., 2019) on Flax NNX. Module attributes are named as in checkpoints.

Other families derive from these classes and override class attributes:

- `Layer.norm_first`, `Stack.norm_first`: pre-norm instead of post-norm.
- `Layer.attention`, `Layer.dense`: functions or classes that create attention and projections.
- `DecoderLayer.layer_sizes`, `DecoderLayer.has_cross_attention`: how the configuration names the
  sizes of a decoder layer, and whether it attends to an encoder.
- `Stack.positions`: class of the position embeddings.
- `Stack.embedding_norm`, `Stack.norm_after_positions`: whether the embeddings are normalized, and
  whether before or after position embeddings are added.
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
from hfseq.nn.visible import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EPSILON = 1e-5


def dense(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Returns a linear layer with the initialization of the family."""
    return nn.Linear(features_in, features_out, nn.normal(config.init_std), rngs)


def token_embedding(config: PreTrainedConfig, rngs: nnx.Rngs, size: int | None = None) -> nn.Embed:
    """Returns the embedding matrix of the vocabulary.

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        size: Number of tokens, `config.vocab_size` by default.
    """
    size = config.vocab_size if size is None else size
    return nn.Embed(size, config.d_model, nn.normal(config.init_std), rngs)


class LearnedPositions(nn.Embed):
    """Learned position embeddings. As in fairseq, the first two embeddings are unused."""

    offset: ClassVar[int] = 2

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        size = config.max_position_embeddings + self.offset
        super().__init__(size, config.d_model, nn.normal(config.init_std), rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        return super().__call__(ids + self.offset)


class LayerDrop(nn.Dropout):
    """LayerDrop (Fan et al., 2019, https://arxiv.org/abs/1909.11556).

    Each example skips the layer at random, independently of the other examples.
    """

    def __call__(self, new: jax.Array, old: jax.Array, rngs: Keys | None) -> jax.Array:  # type: ignore[override]  # two inputs
        """Returns `old` for the examples that skip the layer, and `new` for all other examples.

        `old` is the input of the layer and `new` its output. Both are `(batch, length, hidden)`.
        """
        if rngs is None or not self.rate:
            return new
        bits = rngs.bits((new.shape[0], 1, 1))
        return jnp.where(bits < jnp.uint32(round(self.rate * 65536)), old, new)


class Attention(nn.CachedAttention):
    """Multi-head attention: self-attention, with a cache in decoders, or cross-attention."""

    dense: ClassVar[Callable[..., nn.Linear]] = staticmethod(dense)

    def __init__(
        self,
        config: PreTrainedConfig,
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
    def inner_width(config: PreTrainedConfig) -> int:
        """Returns the total width of all heads."""
        return config.d_model

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
        **attention_options: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        def heads(part: nn.Linear, states: jax.Array) -> jax.Array:
            return part(states).reshape(*states.shape[:2], self.kv_heads, self.head_dim)

        def project_source() -> tuple[jax.Array, jax.Array]:
            return heads(self.k_proj, source), heads(self.v_proj, source)

        key, value = nn.encoder_cache(self, project_source) if self.cross else project_source()
        causal = self.causal
        if causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        attn_output, weights = self.compute_attention(
            heads(self.q_proj, x),
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
            **attention_options,
        )
        return self.out_proj(attn_output.reshape(*x.shape[:2], -1)), weights

    def compute_attention(
        self,
        query: jax.Array,  # (batch, queries, heads, head_dim)
        key: jax.Array,  # (batch, keys, heads, head_dim)
        value: jax.Array,  # (batch, keys, heads, head_dim)
        **options: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes attention. `options` are passed to `hfseq.nn.attend`.

        Returns:
            The output, `(batch, queries, heads, head_dim)`, and the attention weights or `None`.
        """
        return nn.attend(query, key, value, **options)


class Layer(nnx.Module):
    """Base class of encoder and decoder layers: feed-forward block, residual connections, norms."""

    norm_first: bool = False
    attention: ClassVar[Callable[..., Attention]] = Attention
    dense: ClassVar[Callable[..., nn.Linear]] = staticmethod(dense)

    def __init__(self, config: PreTrainedConfig, inner: int, layerdrop: float, rngs: nnx.Rngs):
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
        """Applies `block` with dropout and a residual connection.

        If `norm_first` is set, `norm` is applied to the input of the block. Otherwise, it is
        applied after the residual connection.

        Args:
            norm: Norm of the block.
            block: Function that maps hidden states `(batch, length, hidden)` to the output of the
                block and attention weights.
            x: Hidden states, `(batch, length, hidden)`.
            rngs: PRNG keys for dropout, or `None` to disable dropout.

        Returns:
            Hidden states, `(batch, length, hidden)`, and the attention weights.
        """
        y, weights = block(norm(x) if self.norm_first else x)
        x = x + self.dropout(y, rngs)
        return (x if self.norm_first else norm(x)), weights

    def attend(
        self,
        name: str,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array | None,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool,
        **attention_options: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Applies an attention block.

        Args:
            name: Attribute name of the attention, `self_attn` or `encoder_attn`.
            x: Hidden states, `(batch, length, hidden)`.
            source: Hidden states to attend to, `(batch, source_length, hidden)`. `None` means `x`.
            mask: The keys that each query may attend to.
            rngs: PRNG keys for dropout, or `None` to disable dropout.
            return_weights: Whether to return attention weights.
            **attention_options: Further arguments of `Attention.compute_attention`.

        Returns:
            Hidden states, `(batch, length, hidden)`, and the attention weights or `None`.
        """
        attention, norm = getattr(self, name), getattr(self, f"{name}_layer_norm")

        def block(y: jax.Array) -> Any:
            keys = y if source is None else source
            return attention(y, keys, mask, rngs, return_weights, **attention_options)

        return self.residual_block(norm, block, x, rngs)

    def feed_forward(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Applies the feed-forward block to `x`, `(batch, length, hidden)`."""

        def block(y: jax.Array) -> tuple[jax.Array, None]:
            return self.fc2(self.act_dropout(self.act(self.fc1(y)), rngs)), None

        return self.residual_block(self.final_layer_norm, block, x, rngs)[0]


class EncoderLayer(Layer):
    """Self-attention and feed-forward."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, config.encoder_ffn_dim, config.encoder_layerdrop, rngs)
        self.self_attn = self.attention(config, config.encoder_attention_heads, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
        **attention_options: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        y, weights = self.attend(
            "self_attn", x, None, mask, rngs, return_weights, **attention_options
        )
        return self.layerdrop(self.feed_forward(y, rngs), x, rngs), weights


class DecoderLayer(Layer):
    """Causal self-attention, feed-forward and, if there is an encoder, cross-attention."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        heads, inner, layerdrop = self.layer_sizes(config)
        super().__init__(config, inner, layerdrop, rngs)
        self.self_attn = self.attention(config, heads, rngs, causal=True)
        has_cross_attention = self.has_cross_attention(config)
        encoder_attn = (
            self.attention(config, heads, rngs, cross=True)
            if has_cross_attention
            else nnx.data(None)
        )
        norm = nn.LayerNorm(config.d_model, EPSILON) if has_cross_attention else nnx.data(None)
        self.encoder_attn, self.encoder_attn_layer_norm = encoder_attn, norm

    @staticmethod
    def layer_sizes(config: PreTrainedConfig) -> tuple[int, int, float]:
        """Returns the number of heads, the feed-forward width and the LayerDrop rate."""
        return config.decoder_attention_heads, config.decoder_ffn_dim, config.decoder_layerdrop

    @staticmethod
    def has_cross_attention(config: PreTrainedConfig) -> bool:
        """Returns whether the layer attends to the output of an encoder."""
        return True

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        encoder_hidden_states: jax.Array | None,  # (batch, source_length, hidden)
        encoder_mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
        **attention_options: Any,
    ) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
        y, weights = self.attend(
            "self_attn", x, None, mask, rngs, return_weights, **attention_options
        )
        cross_weights = None
        if encoder_hidden_states is not None:
            y, cross_weights = self.attend(
                "encoder_attn",
                y,
                encoder_hidden_states,
                encoder_mask,
                rngs,
                return_weights,
                **attention_options,
            )
        return self.layerdrop(self.feed_forward(y, rngs), x, rngs), (weights, cross_weights)


class Stack(nnx.Module):
    """Base class of encoder and decoder: embeddings, a stack of layers and norms.

    Args:
        config: Model configuration.
        depth: Number of layers.
        rngs: Random number generators for the initial values.
        own_token_embedding: Whether the stack has its own token embedding. Otherwise it uses the
            embedding that encoder and decoder share.
        size: Number of tokens of the stack's own embedding, `config.vocab_size` by default.
    """

    layer: ClassVar[Callable[..., Layer]]
    positions: ClassVar[Callable[..., Any]] = LearnedPositions
    token_embedding: ClassVar[Callable[..., nn.Embed]] = staticmethod(token_embedding)
    layernorm_embedding: nn.LayerNorm | None
    layer_norm: nn.LayerNorm | None
    embedding_norm: bool = True
    norm_after_positions: bool = True
    norm_first: bool = False

    def __init__(
        self,
        config: PreTrainedConfig,
        depth: int,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        size: int | None = None,
    ):
        embed_tokens = (
            self.token_embedding(config, rngs, size) if own_token_embedding else nnx.data(None)
        )
        self.embed_tokens = embed_tokens
        self.embed_positions = self.positions(config, rngs)
        self.layers = nn.Layers([self.layer(config, rngs) for _ in range(depth)])
        norms = {"layernorm_embedding": self.embedding_norm, "layer_norm": self.norm_first}
        for name, enabled in norms.items():
            setattr(
                self, name, nn.LayerNorm(config.d_model, EPSILON) if enabled else nnx.data(None)
            )
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    def per_layer(self) -> dict[str, jax.Array] | None:
        """Returns keyword arguments whose values differ between layers, or `None`.

        The values of all layers are stacked on the first axis of each array.
        """
        return None

    def run(
        self,
        x: jax.Array,  # (batch, length, hidden)
        *args: Any,
        **options: Any,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...] | None]:
        """Runs the layers and the final norm. The arguments are those of `hfseq.nn.run_layers`.

        Returns:
            The last hidden state, `(batch, length, hidden)`, the attention weights of each layer,
            and the inputs of all layers or `None`.
        """
        x, attentions, layer_inputs = nn.run_layers(
            self.layers, x, *args, per_layer=self.per_layer(), **options
        )
        return x if self.layer_norm is None else self.layer_norm(x), attentions, layer_inputs

    def embed(
        self,
        shared: nn.Embed | None,
        ids: jax.Array,  # (batch, length)
        positions: jax.Array | None,  # (batch, length)
        segments: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        """Embeds tokens and positions.

        Args:
            shared: Token embedding that encoder and decoder share, or `None`.
            ids: Token IDs, `(batch, length)`.
            positions: Position IDs, `(batch, length)`. By default 0, 1, 2, … in each document.
            segments: Document number of each token in packed rows, `(batch, length)`, or `None`.
            rngs: PRNG keys for dropout, or `None` to disable dropout.

        Returns:
            Embeddings, `(batch, length, hidden)`.
        """
        if positions is None:
            row_positions = jnp.arange(ids.shape[1])[None]
            positions = row_positions if segments is None else nn.positions_in_segments(segments)
        table = shared if self.embed_tokens is None else self.embed_tokens
        x, norm = table(ids) * self.scale, self.layernorm_embedding  # type: ignore[misc]  # one of the tables exists
        position_vectors = self.embed_positions(positions)
        if norm is None:
            x = x + position_vectors
        else:
            x = (
                norm(x + position_vectors)
                if self.norm_after_positions
                else norm(x) + position_vectors
            )
        return self.dropout(x, rngs)


class Encoder(Stack):
    """BART encoder."""

    layer = EncoderLayer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, own_token_embedding: bool):
        super().__init__(config, config.encoder_layers, rngs, own_token_embedding)

    def __call__(
        self,
        shared: nn.Embed | None,
        ids: jax.Array,  # (batch, length)
        mask: jax.Array | None,  # (batch, length)
        positions: jax.Array | None,  # (batch, length)
        segments: jax.Array | None,  # (batch, length)
        *,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> out.FlaxModelOutput:
        x, attentions, layer_inputs = self.run(
            self.embed(shared, ids, positions, segments, rngs),
            nn.visible(mask, segments),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class Decoder(Stack):
    """BART decoder."""

    layer = DecoderLayer

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        size: int | None = None,
        depth: int | None = None,
    ):
        depth = config.decoder_layers if depth is None else depth
        super().__init__(config, depth, rngs, own_token_embedding, size)

    def __call__(
        self,
        shared: nn.Embed | None,
        ids: jax.Array,  # (batch, length)
        mask: jax.Array | None,  # (batch, length)
        encoder_hidden_states: jax.Array | None,  # (batch, source_length, hidden)
        encoder_mask: Mask,
        positions: jax.Array | None,  # (batch, length)
        segments: jax.Array | None,  # (batch, length)
        *,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> out.FlaxModelOutput:
        x, attentions, layer_inputs = self.run(
            self.embed(shared, ids, positions, segments, rngs),
            nn.visible(mask, segments),
            encoder_hidden_states,
            encoder_mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        has_cross = output_attentions and encoder_hidden_states is not None
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=tuple(weights for weights, _ in attentions) if output_attentions else None,
            cross_attentions=tuple(weights for _, weights in attentions) if has_cross else None,
        )
