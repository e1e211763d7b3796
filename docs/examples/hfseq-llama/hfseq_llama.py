"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) as a plugin for hfseq."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from transformers import LlamaConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.generation import CausalGeneration
from hfseq.nn import outputs as out


class Attention(nn.CachedAttention):
    """Grouped-query attention, in which several query heads share a key-value head."""

    def __init__(self, config, rngs):
        super().__init__()
        heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.rate = config.head_dim, config.attention_dropout
        width, init = config.hidden_size, nn.normal(config.initializer_range)
        linear = partial(nn.Linear, init=init, rngs=rngs, use_bias=config.attention_bias)
        self.q_proj = linear(width, heads * self.head_dim)
        self.k_proj = linear(width, self.kv_heads * self.head_dim)
        self.v_proj = linear(width, self.kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, width)

    def __call__(self, x, rotary_emb, mask, rngs, return_weights):  # x: (batch, length, hidden)
        shape = (*x.shape[:2], -1, self.head_dim)
        query = nn.rotate(self.q_proj(x).reshape(shape), rotary_emb)
        key = nn.rotate(self.k_proj(x).reshape(shape), rotary_emb)
        value = self.v_proj(x).reshape(shape)
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
        return self.o_proj(attn_output.reshape(*x.shape[:2], -1)), weights


class MLP(nnx.Module):
    """A SwiGLU feed-forward block (Shazeer, 2020)."""

    def __init__(self, config, rngs):
        sizes = (config.hidden_size, config.intermediate_size)
        init = nn.normal(config.initializer_range)
        linear = partial(nn.Linear, init=init, rngs=rngs, use_bias=config.mlp_bias)
        self.gate_proj, self.up_proj = linear(*sizes), linear(*sizes)
        self.down_proj = linear(*sizes[::-1])
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x, rotary_emb, mask, *, rngs, return_weights=False
    ):  # x: (batch, length, hidden)
        attn_output, weights = self.self_attn(
            self.input_layernorm(x), rotary_emb, mask, rngs, return_weights
        )
        x = x + attn_output
        return x + self.mlp(self.post_attention_layernorm(x)), weights


class Llama(nnx.Module):
    def __init__(self, config, rngs):
        self.rotary = nn.Rotary(config, config.head_dim)
        init = nn.normal(config.initializer_range)
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.layers = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self,
        input_ids,  # (batch, length)
        attention_mask=None,  # (batch, length)
        token_type_ids=None,  # (batch, length)
        position_ids=None,  # (batch, length)
        segment_ids=None,  # (batch, length)
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None:
            documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
            position_ids = nn.positions_in_segments(documents)
        mask = nn.visible(attention_mask, segment_ids)
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            self.embed_tokens(input_ids),
            self.rotary(position_ids),
            mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.norm(x)
        states = (*layer_inputs, x) if output_hidden_states else None
        attentions = attentions if output_attentions else None
        return out.FlaxBaseModelOutputWithPast(x, None, states, attentions)


class CausalLM(nnx.Module):
    def __init__(self, config, rngs):
        self.model = Llama(config, rngs)
        sizes, init = (config.hidden_size, config.vocab_size), nn.normal(config.initializer_range)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else nn.Linear(*sizes, init, rngs, use_bias=False)

    def __call__(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        head = self.lm_head or self.model.embed_tokens.attend
        logits, states = head(output.last_hidden_state), output.hidden_states
        return out.FlaxCausalLMOutputWithCrossAttentions(logits, None, states, output.attentions)


class FlaxLlamaModel(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = LlamaConfig, Llama, "model"
    weight_aliases = {"lm_head.weight": "model.embed_tokens.weight"}


class FlaxLlamaForCausalLM(CausalGeneration, FlaxLlamaModel):
    module_class = CausalLM


RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"(q|k|v|gate|up)_proj/kernel$", "column"),
    (r"(q|k|v|gate|up)_proj/bias$", "column_bias"),
    (r"(o|down)_proj/kernel$", "row"),
    (r"norm/scale$|bias$", "vector"),
]


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxLlamaModel, "ForCausalLM": FlaxLlamaForCausalLM}
    register("llama", config=LlamaConfig, heads=heads, sharding=RULES)
