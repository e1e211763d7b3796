"""The layers and stacks of T5 (Raffel et al., 2020) on Flax NNX; names are the checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax
from flax import nnx

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out

if TYPE_CHECKING:
    from transformers import T5Config


def linear(config: T5Config, features_in: int, features_out: int, spread: float, rngs: nnx.Rngs):
    """A Linear without bias, drawn with standard deviation ``initializer_factor * spread``."""
    init = nn.normal(config.initializer_factor * spread)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=False)


def norm(config: T5Config) -> nn.RMSNorm:
    """A norm without mean and bias; its parameter is called ``weight``."""
    return nn.RMSNorm(config.d_model, config.layer_norm_epsilon, leaf="weight")


class Attention(nn.CachedAttention):
    """Attention whose scores are not scaled (the initialisation is); of a sequence or across."""

    def __init__(
        self,
        config: T5Config,
        rngs: nnx.Rngs,
        *,
        causal: bool = False,
        cross: bool = False,
        biased: bool = False,
    ):
        super().__init__()
        self.kv_heads, self.head_dim = config.num_heads, config.d_kv
        self.causal, self.cross, self.rate = causal, cross, config.dropout_rate
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.q = linear(config, width, inner, (inner * config.d_kv) ** -0.5, rngs)
        self.k = linear(config, width, inner, inner**-0.5, rngs)
        self.v = linear(config, width, inner, inner**-0.5, rngs)
        self.o = linear(config, inner, width, inner**-0.5, rngs)
        init = nn.normal(config.initializer_factor * inner**-0.5)
        table = (config.relative_attention_num_buckets, config.num_heads, init, rngs)
        self.relative_attention_bias = nn.Embed(*table) if biased else nnx.data(None)

    def __call__(self, x, source, mask, bias, rngs, return_weights=False):
        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], self.kv_heads, self.head_dim)

        causal = False
        if self.cross:
            key, value = nn.encoder_cache(
                self, lambda: (split(self.k(source)), split(self.v(source)))
            )
        else:
            key, value = split(self.k(x)), split(self.v(x))
        if self.causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        mixed, weights = nn.attend(
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
        return self.o(mixed.reshape(*x.shape[:2], -1)), weights


class SelfAttention(nnx.Module):
    """Norm, attention of a sequence to itself, residual."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs, causal: bool, biased: bool):
        self.SelfAttention = Attention(config, rngs, causal=causal, biased=biased)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(self, x, mask, bias, rngs, return_weights):
        mixed, weights = self.SelfAttention(
            self.layer_norm(x), None, mask, bias, rngs, return_weights
        )
        return x + self.dropout(mixed, rngs), weights


class CrossAttention(nnx.Module):
    """Norm, attention to the encoder's output, residual."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.EncDecAttention = Attention(config, rngs, cross=True)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(self, x, encoded, mask, rngs, return_weights):
        mixed, weights = self.EncDecAttention(
            self.layer_norm(x), encoded, mask, None, rngs, return_weights
        )
        return x + self.dropout(mixed, rngs), weights


class DenseReluDense(nnx.Module):
    """The feed-forward block: T5's, or the gated one of v1.1 (``is_gated_act``)."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.gated = config.is_gated_act
        sizes, spread = (config.d_model, config.d_ff), config.d_model**-0.5
        for name in ("wi_0", "wi_1") if self.gated else ("wi",):
            setattr(self, name, linear(config, *sizes, spread, rngs))
        self.wo = linear(config, *sizes[::-1], config.d_ff**-0.5, rngs)
        self.act = nn.activation(config.dense_act_fn)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        wide = self.act(self.wi_0(x)) * self.wi_1(x) if self.gated else self.act(self.wi(x))
        return self.wo(self.dropout(wide, rngs))


class FeedForward(nnx.Module):
    """Norm, feed-forward, residual."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.DenseReluDense = DenseReluDense(config, rngs)
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x), rngs), rngs)


class Block(nnx.Module):
    """Self-attention, cross-attention in a decoder, feed-forward."""

    own: ClassVar[type[nnx.Module]] = SelfAttention

    def __init__(self, config: T5Config, rngs: nnx.Rngs, decoder: bool, biased: bool):
        crossed = [CrossAttention(config, rngs)] if decoder else []
        own = self.own(config, rngs, causal=decoder, biased=biased)
        self.layer = nnx.List([own, *crossed, FeedForward(config, rngs)])

    def __call__(self, x, mask, bias, encoded, encoded_mask, *, rngs, return_weights=False):
        x, weights = self.layer[0](x, mask, bias, rngs, return_weights)
        cross_weights = None
        if len(self.layer) == 3:
            x, cross_weights = self.layer[1](x, encoded, encoded_mask, rngs, return_weights)
        return self.layer[-1](x, rngs), (weights, cross_weights)


class Stack(nnx.Module):
    """The encoder, or the decoder. All its blocks share the bias that the first one holds."""

    kind: ClassVar[type[Block]] = Block

    def __init__(self, config: T5Config, rngs: nnx.Rngs, decoder: bool = False):
        depth = config.num_decoder_layers if decoder else config.num_layers
        self.block = nn.Layers(
            [self.kind(config, rngs, decoder, biased=number == 0) for number in range(depth)],
            shared=("relative_attention_bias", "global_relative_attention_bias"),
        )
        self.final_layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)
        self.decoder, self.max_distance = decoder, config.relative_attention_max_distance

    @property
    def first_attention(self) -> nnx.Module:
        """The self-attention whose tables of positions all blocks share."""
        first = self.block[0] if isinstance(self.block, nn.Layers) else self.block
        return first.layer[0]

    def position_bias(self, queries: int) -> jax.Array:
        """The bias for the next ``queries`` tokens: (1, heads, queries, keys)."""
        attention, start, keys = self.first_attention.SelfAttention, 0, queries
        if attention.cached_key is not None:
            # With a layer axis where layers are scanned.
            start, keys = attention.cache_index[...].ravel()[0], attention.cached_key.shape[-3]
        table = attention.relative_attention_bias.embedding[...]
        return nn.relative_position_bias(
            table.reshape(table.shape[-2:]),
            queries,
            keys,
            start,
            bidirectional=not self.decoder,
            max_distance=self.max_distance,
        )

    def __call__(
        self,
        embedded,
        mask,
        encoded=None,
        encoded_mask=None,
        *,
        bias=None,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        bias = self.position_bias(embedded.shape[1]) if bias is None else bias
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
        crossed = output_attentions and self.decoder
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=tuple(own for own, _ in weights) if output_attentions else None,
            cross_attentions=tuple(other for _, other in weights) if crossed else None,
        )
