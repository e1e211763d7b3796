"""The layers and stacks of T5 (Raffel et al., 2020) on Flax NNX.

Module attributes are named as in checkpoints. LongT5 overrides `Block.attention_class` and
`Stack.block_class` in subclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, std: float, rngs: nnx.Rngs
) -> nn.Linear:
    """Creates a linear layer without bias.

    The standard deviation of its initial weights is `initializer_factor * std`.
    """
    init = nn.normal(config.initializer_factor * std)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=False)


def norm(config: PreTrainedConfig) -> nn.RMSNorm:
    """Creates an RMSNorm whose parameter is named `weight`, as in checkpoints."""
    return nn.RMSNorm(config.d_model, config.layer_norm_epsilon, leaf="weight")


class Attention(nn.CachedAttention):
    """Self-attention or cross-attention, without scaling of the scores."""

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        *,
        causal: bool = False,
        cross: bool = False,
        biased: bool = False,
    ):
        super().__init__()
        self.kv_heads, self.head_dim = config.num_heads, config.d_kv
        self.causal, self.cross, self.rate = causal, cross, config.dropout_rate
        self.max_distance = config.relative_attention_max_distance
        width, inner = config.d_model, config.num_heads * config.d_kv
        scale = width**-0.5
        self.q = linear(config, width, inner, scale * config.d_kv**-0.5, rngs)
        self.k = linear(config, width, inner, scale, rngs)
        self.v = linear(config, width, inner, scale, rngs)
        self.o = linear(config, inner, width, inner**-0.5, rngs)
        init = nn.normal(config.initializer_factor * scale)
        table = (config.relative_attention_num_buckets, config.num_heads, init, rngs)
        self.relative_attention_bias = nn.Embed(*table) if biased else nnx.data(None)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array | None,  # (batch, source_length, hidden)
        mask: Mask,
        bias: jax.Array | None,  # (1 or batch, heads, queries, keys)
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], self.kv_heads, self.head_dim)

        causal = False
        if self.cross:
            states: Any = source  # cross-attention always has a source
            key, value = nn.encoder_cache(
                self, lambda: (split(self.k(states)), split(self.v(states)))
            )
        else:
            key, value = split(self.k(x)), split(self.v(x))
        if self.causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        attn_output, weights = nn.attend(
            split(self.q(x)),
            key,
            value,
            mask=mask,
            bias=bias,
            causal=causal,
            scale=1.0,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.o(attn_output.reshape(*x.shape[:2], -1)), weights

    def position_bias(self, queries: int) -> jax.Array:
        """Returns the bias of the next `queries` tokens, `(1, heads, queries, keys)`."""
        start: int | jax.Array = 0
        keys = queries
        if self.cached_key is not None:
            # In scanned layers, the first axis of these arrays is the layer.
            start, keys = self.cache_index[...].ravel()[0], self.cached_key.shape[-3]
        table = self.relative_attention_bias.embedding[...]  # type: ignore[union-attr]  # only called if it exists
        return nn.relative_position_bias(
            table.reshape(table.shape[-2:]),
            queries,
            keys,
            start,
            bidirectional=not self.causal,
            max_distance=self.max_distance,
        )


class SelfAttention(nnx.Module):
    """Pre-norm self-attention with residual connection."""

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, causal: bool, biased: bool):
        self.SelfAttention = self.attention_class(config, rngs, causal=causal, biased=biased)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        bias: jax.Array | None,  # (1 or batch, heads, queries, keys)
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.SelfAttention(
            self.layer_norm(x), None, mask, bias, rngs, return_weights
        )
        return x + self.dropout(attn_output, rngs), weights


class CrossAttention(nnx.Module):
    """Pre-norm attention to the encoder's output with residual connection."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.EncDecAttention = Attention(config, rngs, cross=True)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        encoded: jax.Array | None,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.EncDecAttention(
            self.layer_norm(x), encoded, mask, None, rngs, return_weights
        )
        return x + self.dropout(attn_output, rngs), weights


class DenseReluDense(nnx.Module):
    """The feed-forward layers. They are gated in T5 v1.1 (`is_gated_act`)."""

    if TYPE_CHECKING:
        wi: nn.Linear
        wi_0: nn.Linear
        wi_1: nn.Linear

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.gated = config.is_gated_act
        sizes, std = (config.d_model, config.d_ff), config.d_model**-0.5
        for name in ("wi_0", "wi_1") if self.gated else ("wi",):
            setattr(self, name, linear(config, *sizes, std, rngs))
        self.wo = linear(config, *sizes[::-1], config.d_ff**-0.5, rngs)
        self.act = nn.activation(config.dense_act_fn)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        inner = self.act(self.wi_0(x)) * self.wi_1(x) if self.gated else self.act(self.wi(x))
        return self.wo(self.dropout(inner, rngs))


class FeedForward(nnx.Module):
    """Pre-norm feed-forward block with residual connection."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.DenseReluDense = DenseReluDense(config, rngs)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x), rngs), rngs)


class Block(nnx.Module):
    """One layer: self-attention, cross-attention (only in the decoder) and feed-forward."""

    attention_class: ClassVar[Callable[..., nnx.Module]] = SelfAttention

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, decoder: bool, biased: bool):
        cross_attention = [CrossAttention(config, rngs)] if decoder else []
        self_attention = self.attention_class(config, rngs, causal=decoder, biased=biased)
        self.layer = nnx.List([self_attention, *cross_attention, FeedForward(config, rngs)])

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        bias: jax.Array | None,  # (1 or batch, heads, queries, keys)
        encoded: jax.Array | None,  # (batch, source_length, hidden)
        encoded_mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
        x, weights = self.layer[0](x, mask, bias, rngs, return_weights)
        cross_weights = None
        if len(self.layer) == 3:
            x, cross_weights = self.layer[1](x, encoded, encoded_mask, rngs, return_weights)
        return self.layer[-1](x, rngs), (weights, cross_weights)


class Stack(nnx.Module):
    """The encoder or the decoder.

    Attributes:
        block_class: Class of the blocks.
        shared_bias: Whether all blocks share the position bias of the first block. Otherwise each
            block computes its own.
    """

    block_class: ClassVar[type[Block]] = Block
    shared_bias: ClassVar[bool] = True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, decoder: bool = False):
        depth = config.num_decoder_layers if decoder else config.num_layers
        self.block = nn.Layers(
            [
                self.block_class(config, rngs, decoder, biased=i == 0 or not self.shared_bias)
                for i in range(depth)
            ],
            shared=("relative_attention_bias", "global_relative_attention_bias")
            if self.shared_bias
            else (),
        )
        self.final_layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)
        # None means that the model's shared token embeddings are used.
        self.embed_tokens: nn.Embed | None = nnx.data(None)
        self.decoder, self.max_distance = decoder, config.relative_attention_max_distance

    @property
    def first_attention(self) -> Any:
        """The self-attention of the first block, which contains the shared position bias."""
        first = self.block[0] if isinstance(self.block, nn.Layers) else self.block
        return first.layer[0]

    def __call__(
        self,
        embedded: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        encoded: jax.Array | None = None,  # (batch, source_length, hidden)
        encoded_mask: Mask = None,
        *,
        bias: jax.Array | None = None,  # (1 or batch, heads, queries, keys)
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if self.shared_bias and bias is None:
            bias = self.first_attention.SelfAttention.position_bias(embedded.shape[1])
        x, weights, inputs = nn.run_layers(
            self.block,
            self.dropout(embedded, rngs),
            mask,
            bias,
            encoded,
            encoded_mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.dropout(self.final_layer_norm(x), rngs)
        has_cross_weights = output_attentions and self.decoder
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if inputs is not None else None,
            attentions=tuple(attn for attn, _ in weights) if output_attentions else None,
            cross_attentions=tuple(attn for _, attn in weights) if has_cross_weights else None,
        )
