"""BLOOM (BigScience Workshop, 2022) on Flax NNX. Module attributes are named as in checkpoints.

Instead of position embeddings, BLOOM adds a bias to attention scores that grows with the position
of the key (ALiBi, Press et al., 2021).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import BloomConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.decoder.modeling import linear


class Attention(nn.CachedAttention):
    """Causal attention with one projection that computes query, key and value of each head."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.n_head
        self.head_dim, self.rate = width // self.kv_heads, config.attention_dropout
        self.query_key_value = linear(config, width, 3 * width, rngs, bias=True)
        self.dense = linear(config, width, width, rngs, bias=True)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        positions: jax.Array | None,  # (batch, keys)
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        fused = self.query_key_value(x).reshape(*x.shape[:2], self.kv_heads, 3, self.head_dim)
        query, key, value = (fused[..., part, :] for part in range(3))
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        if positions is None:
            positions = jnp.arange(key.shape[1])[None]
        slopes = nn.alibi_slopes(self.kv_heads)[:, None, None]
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            bias=slopes * positions[:, None, None],  # type: ignore[arg-type]  # a jax array
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.dense(attn_output.reshape(x.shape)), weights


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.dense_h_to_4h = linear(config, width, 4 * width, rngs, bias=True)
        self.dense_4h_to_h = linear(config, 4 * width, width, rngs, bias=True)
        self.act = nn.activation("gelu_new")

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Block(nnx.Module):
    """Pre-norm layer: attention and feed-forward.

    If `config.apply_residual_connection_post_layernorm` is set, the residual connections start
    after the norms instead of before them.
    """

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs):
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.input_layernorm = nn.LayerNorm(width, epsilon)
        self.self_attention = Attention(config, rngs)
        self.post_attention_layernorm = nn.LayerNorm(width, epsilon)
        self.mlp = MLP(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.normed_residual = config.apply_residual_connection_post_layernorm

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        positions: jax.Array | None,  # (batch, keys)
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        normed = self.input_layernorm(x)
        attn_output, weights = self.self_attention(normed, mask, positions, rngs, return_weights)
        x = (normed if self.normed_residual else x) + self.dropout(attn_output, rngs)
        normed = self.post_attention_layernorm(x)
        x = normed if self.normed_residual else x
        return x + self.dropout(self.mlp(normed), rngs), weights


class Transformer(nnx.Module):
    """BLOOM decoder without a head."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs):
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        init = nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.word_embeddings_layernorm = nn.LayerNorm(width, epsilon)
        self.h = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(width, epsilon)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        # In packed rows, positions are counted from the start of the row instead of the document.
        # This adds the same number to the scores of all keys of a query, which does not change the
        # attention weights.
        positions = None if attention_mask is None else nn.positions_from_mask(attention_mask)
        x, attentions, layer_inputs = nn.run_layers(
            self.h,
            self.word_embeddings_layernorm(self.word_embeddings(input_ids)),
            nn.visible(attention_mask, segment_ids),
            positions,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.ln_f(x)
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class CausalLM(nnx.Module):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        output = self.transformer(
            input_ids,
            attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        head = self.transformer.word_embeddings.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxBloomPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the BLOOM models: configuration, checkpoint names and call signature."""

    config_class = BloomConfig
    base_model_prefix = "transformer"
    weight_aliases = {"lm_head.weight": "transformer.word_embeddings.weight"}

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        past_key_values: trees.Params | None = None,
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

        `input_ids` is `(batch, length)`. `attention_mask` is `(batch, length)`, or `(batch,
        cache_length)` with a cache. For packed rows, `segment_ids`, `(batch, length)`, is the
        document number of each token.
        """
        model_inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxBloomModel(FlaxBloomPreTrainedModel):
    """BLOOM without a head. Returns hidden states."""

    module_class = Transformer


class FlaxBloomForCausalLM(CausalGeneration, FlaxBloomPreTrainedModel):
    """BLOOM with a language modeling head."""

    module_class = CausalLM

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the first call, without position IDs."""
        model_inputs = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
        del model_inputs["position_ids"]
        return model_inputs

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the next call, with the new cache."""
        return {**model_kwargs, "past_key_values": model_outputs.past_key_values}
