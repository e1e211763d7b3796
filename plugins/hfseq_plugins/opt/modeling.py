"""OPT (Zhang et al., 2022) on Flax NNX; attribute names are the checkpoint's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import OPTConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out

#: Rows of the position table before the first position.
OFFSET = 2


def linear(
    config: OPTConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """A Linear with the family's initialisation."""
    return nn.Linear(features_in, features_out, nn.normal(config.init_std), rngs, use_bias=bias)


def norm(config: OPTConfig) -> nn.LayerNorm:
    """A norm over the hidden size, without parameters where the configuration says so."""
    affine = config.layer_norm_elementwise_affine
    return nn.LayerNorm(config.hidden_size, 1e-5, use_bias=affine, use_scale=affine)


class Attention(nn.CachedAttention):
    """Attention to what came before."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.rate = width // self.kv_heads, config.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            linear(config, width, width, rngs, config.enable_bias) for _ in range(4)
        )

    def __call__(self, x, mask, rngs, return_weights=False):
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        query, key, value = (
            part(x).reshape(shape) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(mixed.reshape(x.shape)), weights


class Layer(nnx.Module):
    """Attention and feed-forward, a norm before each; in the model of 350M parameters after."""

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

    def __call__(self, x, mask, *, rngs, return_weights=False):
        given = self.self_attn_layer_norm(x) if self.norm_first else x
        mixed, weights = self.self_attn(given, mask, rngs, return_weights)
        x = x + self.dropout(mixed, rngs)
        x = x if self.norm_first else self.self_attn_layer_norm(x)
        given = self.final_layer_norm(x) if self.norm_first else x
        x = x + self.dropout(self.fc2(self.act(self.fc1(given))), rngs)
        return x if self.norm_first else self.final_layer_norm(x), weights


class Decoder(nnx.Module):
    """Token vectors, which may be narrower than the layers, positions and layers."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        width, narrow = config.hidden_size, config.word_embed_proj_dim
        init, rows = nn.normal(config.init_std), config.max_position_embeddings + OFFSET
        self.embed_tokens = nn.Embed(config.vocab_size, narrow, init, rngs)
        self.embed_positions = nn.Embed(rows, width, init, rngs)
        self.project_in = self.project_out = nnx.data(None)
        if narrow != width:
            self.project_in = linear(config, narrow, width, rngs, bias=False)
            self.project_out = linear(config, width, narrow, rngs, bias=False)
        last = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = norm(config) if last else nnx.data(None)
        self.layers = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None and segment_ids is not None:
            position_ids = nn.positions_in_segments(segment_ids)
        elif position_ids is None and attention_mask is not None:
            real = (attention_mask != 0).astype(jnp.int32)
            position_ids = jnp.cumsum(real, -1) * real - 1  # padding has a row of its own
        elif position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
        x = self.embed_tokens(input_ids)
        x = x if self.project_in is None else self.project_in(x)
        x, weights, inputs = nn.run_layers(
            self.layers,
            x + self.embed_positions(position_ids + OFFSET),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        for last in (self.final_layer_norm, self.project_out):
            x = x if last is None else last(x)
        return out.FlaxBaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class OPTModule(nnx.Module):
    """OPT without a head."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs)

    def __call__(
        self, input_ids, attention_mask=None, position_ids=None, segment_ids=None, **options: Any
    ):
        return self.decoder(input_ids, attention_mask, position_ids, segment_ids, **options)


class CausalLM(nnx.Module):
    """Next-token prediction, with the word embeddings where the head is tied to them."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.model = OPTModule(config, rngs)
        sizes, tied = (config.word_embed_proj_dim, config.vocab_size), config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        head = self.model.decoder.embed_tokens.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=head(output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxOPTPreTrainedModel(FlaxPreTrainedModel):
    """Base of the OPT classes: configuration, checkpoint names and the call of Transformers 4."""

    config_class = OPTConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        dropout_rng: jax.Array | Keys | None = None,
        deterministic=None,
        *,
        train=False,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids``, ``attention_mask`` and ``position_ids`` are (batch, length); positions count
        what may be seen where none are given. ``segment_ids`` (batch, length) numbers the documents
        of packed rows. ``deterministic=False`` is what other families call ``train=True``.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            given,
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
    """OPT without a head: hidden states."""

    module_class = OPTModule


class FlaxOPTForCausalLM(CausalGeneration, FlaxOPTPreTrainedModel):
    """OPT with its language-modelling head."""

    module_class = CausalLM
