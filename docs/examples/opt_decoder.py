"""OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068): a decoder for hfseq in one file."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from transformers import OPTConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.generation import CausalGeneration
from hfseq.nn import outputs as out

OFFSET = 2  # number of unused rows at the start of the position embedding matrix


def norm(config):
    affine = config.layer_norm_elementwise_affine
    return nn.LayerNorm(config.hidden_size, 1e-5, use_bias=affine, use_scale=affine)


class Attention(nn.CachedAttention):
    def __init__(self, config, rngs):
        super().__init__()
        width, self.rate = config.hidden_size, config.attention_dropout
        self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            width // config.num_attention_heads,
        )
        linear = partial(
            nn.Linear, width, width, nn.normal(config.init_std), rngs, use_bias=config.enable_bias
        )
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (linear() for _ in range(4))

    def __call__(self, x, mask, rngs, return_weights):  # x: (batch, length, hidden)
        parts, shape = (self.q_proj, self.k_proj, self.v_proj), (*x.shape[:2], self.kv_heads, -1)
        query, key, value = (part(x).reshape(shape) for part in parts)
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        options = {"dropout_rate": self.rate, "rngs": rngs, "return_weights": return_weights}
        attn_output, weights = nn.attend(query, key, value, mask=mask, causal=causal, **options)
        return self.out_proj(attn_output.reshape(x.shape)), weights


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        width, inner, init = config.hidden_size, config.ffn_dim, nn.normal(config.init_std)
        self.norm_first = config.do_layer_norm_before
        self.self_attn = Attention(config, rngs)
        self.self_attn_layer_norm, self.final_layer_norm = norm(config), norm(config)
        self.fc1 = nn.Linear(width, inner, init, rngs, use_bias=config.enable_bias)
        self.fc2 = nn.Linear(inner, width, init, rngs, use_bias=config.enable_bias)
        self.act = nn.activation(config.activation_function)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(self, x, mask, *, rngs=None, return_weights=False):  # x: (batch, length, hidden)
        h = self.self_attn_layer_norm(x) if self.norm_first else x
        h, weights = self.self_attn(h, mask, rngs, return_weights)
        x = x + self.dropout(h, rngs)
        x = x if self.norm_first else self.self_attn_layer_norm(x)
        h = self.final_layer_norm(x) if self.norm_first else x
        x = x + self.dropout(self.fc2(self.act(self.fc1(h))), rngs)
        return x if self.norm_first else self.final_layer_norm(x), weights


class Decoder(nnx.Module):
    def __init__(self, config, rngs):
        width, narrow = config.hidden_size, config.word_embed_proj_dim
        rows, init = config.max_position_embeddings + OFFSET, nn.normal(config.init_std)
        linear = partial(nn.Linear, init=init, rngs=rngs, use_bias=False)
        self.embed_tokens = nn.Embed(config.vocab_size, narrow, init, rngs)
        self.embed_positions = nn.Embed(rows, width, init, rngs)
        self.project_in = linear(narrow, width) if narrow != width else nnx.data(None)
        self.project_out = linear(width, narrow) if narrow != width else nnx.data(None)
        last = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = norm(config) if last else nnx.data(None)
        self.layers = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])

    def __call__(
        self,
        input_ids,  # (batch, length)
        attention_mask=None,  # (batch, length)
        position_ids=None,  # (batch, length)
        segment_ids=None,  # (batch, length)
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None and segment_ids is None and attention_mask is not None:
            position_ids = jnp.cumsum(attention_mask, -1) * attention_mask - 1
        elif position_ids is None:
            documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
            position_ids = nn.positions_in_segments(documents)
        x = self.embed_tokens(input_ids)
        x = self.project_in(x) if self.project_in else x
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            x + self.embed_positions(position_ids + OFFSET),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        for part in (self.final_layer_norm, self.project_out):
            x = part(x) if part else x
        states = (*layer_inputs, x) if output_hidden_states else None
        attentions = attentions if output_attentions else None
        return out.FlaxBaseModelOutputWithPast(x, None, states, attentions)


class OPT(nnx.Module):
    def __init__(self, config, rngs):
        self.decoder = Decoder(config, rngs)

    def __call__(self, *args, **kwargs):
        return self.decoder(*args, **kwargs)


class CausalLM(nnx.Module):
    def __init__(self, config, rngs):
        self.model = OPT(config, rngs)
        sizes, tied = (config.word_embed_proj_dim, config.vocab_size), config.tie_word_embeddings
        linear = partial(nn.Linear, *sizes, nn.normal(config.init_std), rngs, use_bias=False)
        self.lm_head = nnx.data(None) if tied else linear()

    def __call__(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        logits = (self.lm_head or self.model.decoder.embed_tokens.attend)(output[0])
        states, weights = output.hidden_states, output.attentions
        return out.FlaxCausalLMOutputWithCrossAttentions(logits, None, states, weights)


class FlaxOPTModel(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = OPTConfig, OPT, "model"
    weight_aliases = {"lm_head.weight": "model.decoder.embed_tokens.weight"}


class FlaxOPTForCausalLM(CausalGeneration, FlaxOPTModel):
    module_class = CausalLM


RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"embed_positions/embedding$", "table"),
    (r"((q|k|v)_proj|fc1)/kernel$", "column"),
    (r"((q|k|v)_proj|fc1)/bias$", "column_bias"),
    (r"(out_proj|fc2)/kernel$", "row"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"project_(in|out)/kernel$", "table"),
    (r"norm/scale$|bias$", "vector"),
]


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxOPTModel, "ForCausalLM": FlaxOPTForCausalLM}
    register("opt", config=OPTConfig, heads=heads, sharding=RULES, card="A decoder by Meta AI.")
