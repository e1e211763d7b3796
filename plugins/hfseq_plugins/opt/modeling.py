"""OPT (Zhang et al., 2022) on Flax NNX. Module attributes are named as in checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import OPTConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bart.layers import LayerDrop

#: Number of unused position embeddings at the start. Position 0 uses the embedding with this index.
OFFSET = 2


def linear(
    config: OPTConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """Returns a linear layer with the initialization of the family."""
    return nn.Linear(features_in, features_out, nn.normal(config.init_std), rngs, use_bias=bias)


def norm(config: OPTConfig) -> nn.LayerNorm:
    """Returns a LayerNorm over the hidden size, with or without parameters."""
    affine = config.layer_norm_elementwise_affine
    return nn.LayerNorm(config.hidden_size, 1e-5, use_bias=affine, use_scale=affine)


class Attention(nn.CachedAttention):
    """Causal multi-head self-attention."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.rate = width // self.kv_heads, config.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            linear(config, width, width, rngs, config.enable_bias) for _ in range(4)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        query, key, value = (
            part(x).reshape(shape) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(attn_output.reshape(x.shape)), weights


class Layer(nnx.Module):
    """Attention and feed-forward. Layers are pre-norm, except in the 350M model (post-norm)."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.ffn_dim, config.enable_bias
        self.norm_first = config.do_layer_norm_before
        self.self_attn, self.self_attn_layer_norm = Attention(config, rngs), norm(config)
        self.fc1 = linear(config, width, inner, rngs, bias)
        self.fc2 = linear(config, inner, width, rngs, bias)
        self.act, self.dropout = (
            nn.activation(config.activation_function),
            nn.Dropout(config.dropout),
        )
        self.final_layer_norm = norm(config)
        self.layerdrop = LayerDrop(config.layerdrop)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        layer_input = x
        normed = self.self_attn_layer_norm(x) if self.norm_first else x
        attn_output, weights = self.self_attn(normed, mask, rngs, return_weights)
        x = x + self.dropout(attn_output, rngs)
        x = x if self.norm_first else self.self_attn_layer_norm(x)
        normed = self.final_layer_norm(x) if self.norm_first else x
        x = x + self.dropout(self.fc2(self.act(self.fc1(normed))), rngs)
        x = x if self.norm_first else self.final_layer_norm(x)
        return self.layerdrop(x, layer_input, rngs), weights


class Decoder(nnx.Module):
    """OPT decoder. The token embeddings may be narrower than the hidden size."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        width, embedding_width = config.hidden_size, config.word_embed_proj_dim
        init, rows = nn.normal(config.init_std), config.max_position_embeddings + OFFSET
        self.embed_tokens = nn.Embed(config.vocab_size, embedding_width, init, rngs)  # type: ignore[arg-type]  # defaults to hidden_size
        self.embed_positions = nn.Embed(rows, width, init, rngs)
        self.project_in = self.project_out = nnx.data(None)
        if embedding_width != width:
            self.project_in = linear(config, embedding_width, width, rngs, bias=False)  # type: ignore[arg-type]  # defaults to hidden_size
            self.project_out = linear(config, width, embedding_width, rngs, bias=False)  # type: ignore[arg-type]  # defaults to hidden_size
        use_final_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = norm(config) if use_final_norm else nnx.data(None)
        self.layers = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])

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
        if position_ids is None and segment_ids is not None:
            position_ids = nn.positions_in_segments(segment_ids)
        elif position_ids is None and attention_mask is not None:
            is_token = (attention_mask != 0).astype(jnp.int32)
            position_ids = jnp.cumsum(is_token, -1) * is_token - 1  # -1 for padding
        elif position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
        x = self.embed_tokens(input_ids)
        x = x if self.project_in is None else self.project_in(x)
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            x + self.embed_positions(position_ids + OFFSET),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        for module in (self.final_layer_norm, self.project_out):
            x = x if module is None else module(x)
        return out.FlaxBaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class OPTModule(nnx.Module):
    """Contains the OPT decoder as the attribute `decoder`, as in checkpoints."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        **options: Any,
    ) -> out.FlaxModelOutput:
        return self.decoder(input_ids, attention_mask, position_ids, segment_ids, **options)


class CausalLM(nnx.Module):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.model = OPTModule(config, rngs)
        sizes, tied = (config.word_embed_proj_dim, config.vocab_size), config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)  # type: ignore[arg-type]  # defaults to hidden_size

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.model(*args, **kwargs)
        head = self.model.decoder.embed_tokens.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxOPTPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the OPT models: configuration, checkpoint names and call signature."""

    config_class = OPTConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        deterministic: bool | None = None,
        *,
        train: bool = False,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `input_ids`, `attention_mask` and `position_ids` are `(batch, length)`. By default,
        positions count the tokens that `attention_mask` includes. For packed rows, `segment_ids`,
        `(batch, length)`, is the document number of each token. `deterministic=False` has the same
        effect as `train=True`.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train if deterministic is None else not deterministic,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxOPTModel(FlaxOPTPreTrainedModel):
    """OPT without a head. Returns hidden states."""

    module_class = OPTModule


class FlaxOPTForCausalLM(CausalGeneration, FlaxOPTPreTrainedModel):
    """OPT with a language modeling head."""

    module_class = CausalLM
