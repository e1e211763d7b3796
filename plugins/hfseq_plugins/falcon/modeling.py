"""Falcon (Almazrouei et al., 2023) on Flax NNX. Module attributes are named as in checkpoints.

The configuration selects one of these layers:

* Falcon-RW: attention before the feed-forward block, with ALiBi.
* Falcon 7B: attention and feed-forward block in parallel, with one key and value head.
* Falcon 11B, 40B and 180B, the "new decoder architecture": attention and feed-forward block in
  parallel, with several key and value heads.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import FalconConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.decoder import modeling as decoder
from hfseq_plugins.decoder.modeling import FlaxDecoderPreTrainedModel, linear

RULES = [
    (r"word_embeddings/embedding$", "embedding"),
    (r"(query_key_value|dense_h_to_4h)/kernel$", "column"),
    (r"(query_key_value|dense_h_to_4h)/bias$", "column_bias"),
    (r"(dense|dense_4h_to_h)/kernel$", "row"),
    (r"(dense|dense_4h_to_h)/bias$", "vector"),
    (r"(layernorm|ln_attn|ln_mlp|ln_f)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"(classifier|score|qa_outputs)/kernel$", "row_table"),
    (r"(classifier|score|qa_outputs)/bias$", "replicated"),
]


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds to the precision of bfloat16 with an operation that the compiler does not remove."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def alibi(heads: int, positions: jax.Array) -> jax.Array:
    """Returns linear biases of the attention scores for each key (ALiBi; Press et al., 2021).

    Slopes, positions and their products are rounded to bfloat16, as in PyTorch.

    Args:
        heads: Number of attention heads.
        positions: Positions of the keys, `(batch, keys)`.

    Returns:
        Biases, float32 `(batch, heads, 1, keys)`.
    """
    slopes = round_to_bfloat16(jnp.asarray(nn.alibi_slopes(heads)))[:, None, None]
    return round_to_bfloat16(slopes * round_to_bfloat16(positions)[:, None, None])


class Attention(nn.CachedAttention):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, config: FalconConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = width // self.heads
        if self.head_dim * self.heads != width:
            raise UsageError(
                f"num_attention_heads={self.heads} in the configuration does not divide "
                f"hidden_size={width}"
            )
        grouped = bool(config.new_decoder_architecture)
        shared = not grouped and config.multi_query
        self.kv_heads = cast("int", config.num_kv_heads) if grouped else self.heads
        if shared:
            self.kv_heads = 1
        if self.heads % self.kv_heads:
            raise UsageError(
                f"num_attention_heads={self.heads} in the configuration must be a multiple of "
                f"num_kv_heads={self.kv_heads}"
            )
        # PyTorch's class only applies dropout to attention weights with ALiBi.
        self.rate = float(config.attention_dropout or 0.0) if config.alibi else 0.0
        features = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.query_key_value = linear(config, width, features, rngs, bool(config.bias))
        self.dense = linear(config, width, width, rngs, bool(config.bias))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles | None,
        positions: jax.Array | None,  # (batch, keys)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        lead = x.shape[:2]
        # The output of the projection contains, for each group, the query heads, one key head and
        # one value head.
        groups = self.heads // self.kv_heads + 2
        fused = self.query_key_value(x).reshape(*lead, self.kv_heads, groups, self.head_dim)
        query = fused[..., :-2, :].reshape(*lead, self.heads, self.head_dim)
        key, value = fused[..., -2, :], fused[..., -1, :]
        if rotary_emb is not None:
            query, key = nn.rotate(query, rotary_emb), nn.rotate(key, rotary_emb)
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        bias = None
        if rotary_emb is None:
            if positions is None:
                positions = jnp.arange(key.shape[1])[None]
            bias = alibi(self.heads, positions) * self.head_dim**-0.5
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.dense(attn_output.reshape(x.shape)), weights


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: FalconConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, cast("int", config.ffn_hidden_size)
        bias = bool(config.bias)
        self.dense_h_to_4h = linear(config, width, inner, rngs, bias)
        self.dense_4h_to_h = linear(config, inner, width, rngs, bias)
        self.act = nn.activation(cast("str", config.activation))

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Block(nnx.Module):
    """Attention and feed-forward block, in parallel or one after the other.

    Attributes:
        input_layernorm: The norm before attention, or before both blocks.
        post_attention_layernorm: The norm before the feed-forward block, if it follows attention.
        ln_attn: The norm before attention, if both blocks have separate norms.
        ln_mlp: The norm before the feed-forward block, if both blocks have separate norms.
    """

    input_layernorm: nn.LayerNorm
    post_attention_layernorm: nn.LayerNorm
    ln_attn: nn.LayerNorm
    ln_mlp: nn.LayerNorm

    def __init__(self, config: FalconConfig, rngs: nnx.Rngs):
        width, epsilon = config.hidden_size, cast("float", config.layer_norm_epsilon)
        self.parallel, grouped = bool(config.parallel_attn), config.new_decoder_architecture
        norms = config.num_ln_in_parallel_attn or (2 if grouped else 1)
        self.two_norms = self.parallel and norms == 2
        if grouped and not self.parallel or self.two_norms and not grouped:
            raise UsageError(
                f"new_decoder_architecture={bool(grouped)} in the configuration does not support "
                f"parallel_attn={self.parallel} with num_ln_in_parallel_attn={norms}: "
                "new_decoder_architecture=True requires parallel_attn=True, and two norms require "
                "new_decoder_architecture=True"
            )
        names = ("ln_attn", "ln_mlp") if self.two_norms else ("input_layernorm",)
        for name in names if self.parallel else ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, nn.LayerNorm(width, epsilon))
        self.self_attention, self.mlp = Attention(config, rngs), MLP(config, rngs)
        self.attention_dropout = nn.Dropout(config.attention_dropout or 0.0)
        self.dropout = nn.Dropout(config.hidden_dropout or 0.0)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles | None,
        positions: jax.Array | None,  # (batch, keys)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        normed = self.ln_attn(x) if self.two_norms else self.input_layernorm(x)
        attn_output, weights = self.self_attention(
            normed, rotary_emb, positions, mask, rngs, return_weights
        )
        if self.parallel:
            output = self.mlp(self.ln_mlp(x) if self.two_norms else normed) + attn_output
        else:
            # As in PyTorch, the rate is attention_dropout, which is also the rate for attention
            # weights.
            x = x + self.attention_dropout(attn_output, rngs)
            output = self.mlp(self.post_attention_layernorm(x))
        return x + self.dropout(output, rngs), weights


class Transformer(nnx.Module):
    """Falcon decoder without a head."""

    def __init__(self, config: FalconConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        head_dim = width // config.num_attention_heads
        self.rotary = None if config.alibi else nn.Rotary(config, head_dim)
        init = nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.h = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(width, cast("float", config.layer_norm_epsilon))

    @property
    def embeddings(self) -> nn.Embed:
        """The token embeddings."""
        return self.word_embeddings

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            positions = jnp.arange(input_ids.shape[1])[None]
            position_ids = (
                positions if segment_ids is None else nn.positions_in_segments(segment_ids)
            )
        # ALiBi ignores position IDs. The position of a token is the number of tokens before it.
        key_positions = None
        if segment_ids is not None:
            key_positions = nn.positions_in_segments(segment_ids)
        elif attention_mask is not None and attention_mask.ndim == 2:
            key_positions = nn.positions_from_mask(attention_mask)
        x, attentions, layer_inputs = nn.run_layers(
            self.h,
            self.word_embeddings(input_ids),
            None if self.rotary is None else self.rotary(position_ids),
            key_positions,
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.ln_f(x)
        return out.FlaxBaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class CausalLM(decoder.CausalLM):
    """Causal language model. A tied head reuses the word embeddings."""

    decoder_class, decoder_name = Transformer, "transformer"


class SequenceClassification(decoder.SequenceClassification):
    """Sequence classification or regression, from the last token that is not padding."""

    decoder_class, decoder_name = Transformer, "transformer"


class QuestionAnswering(decoder.QuestionAnswering):
    """Decoder with a head for extractive question answering."""

    decoder_class, decoder_name = Transformer, "transformer"


class TokenClassification(decoder.TokenClassification):
    """Decoder with a token classification head."""

    decoder_class, decoder_name = Transformer, "transformer"
    classifier_name = "classifier"


class FlaxFalconPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Falcon models: configuration and checkpoint names."""

    config_class = FalconConfig
    base_model_prefix = "transformer"
    weight_aliases = {"lm_head.weight": "transformer.word_embeddings.weight"}


class FlaxFalconModel(FlaxFalconPreTrainedModel):
    """Falcon without a head. Returns hidden states."""

    module_class = Transformer


class FlaxFalconForCausalLM(CausalGeneration, FlaxFalconPreTrainedModel):
    """Falcon with a language modeling head."""

    module_class = CausalLM


class FlaxFalconForSequenceClassification(FlaxFalconPreTrainedModel):
    """Falcon for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxFalconForQuestionAnswering(FlaxFalconPreTrainedModel):
    """Falcon for extractive question answering."""

    module_class = QuestionAnswering


class FlaxFalconForTokenClassification(FlaxFalconPreTrainedModel):
    """Falcon for token classification."""

    module_class = TokenClassification
