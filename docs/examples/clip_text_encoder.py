"""The CLIP text encoder (Radford et al., 2021, https://arxiv.org/abs/2103.00020) in one file."""

import jax.numpy as jnp
from flax import nnx
from transformers import CLIPTextConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.nn import outputs as out


def inner_std(config):
    return config.initializer_factor * (2 * config.hidden_size * config.num_hidden_layers) ** -0.5


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        width, init = config.hidden_size, nn.normal(inner_std(config))
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        parts = (nn.Linear(width, width, init, rngs) for _ in range(3))
        self.q_proj, self.k_proj, self.v_proj = parts
        out_init = nn.normal(config.initializer_factor * width**-0.5)
        self.out_proj = nn.Linear(width, width, out_init, rngs)

    def __call__(self, x, mask, rngs, return_weights):  # x: (batch, length, hidden)
        parts = (part(x) for part in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.reshape(*x.shape[:2], self.heads, -1) for part in parts)
        options = {"dropout_rate": self.rate, "rngs": rngs, "return_weights": return_weights}
        attn_output, weights = nn.attend(query, key, value, mask=mask, causal=True, **options)
        return self.out_proj(attn_output.reshape(x.shape)), weights


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        width, inner = config.hidden_size, config.intermediate_size
        wide = nn.normal(config.initializer_factor * (2 * width) ** -0.5)
        self.self_attn, self.act = Attention(config, rngs), nn.activation(config.hidden_act)
        self.layer_norm1 = nn.LayerNorm(width, config.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(width, config.layer_norm_eps)
        # nnx.Dict groups submodules under a name of the checkpoint without a separate class.
        narrow = nn.Linear(inner, width, nn.normal(inner_std(config)), rngs)
        self.mlp = nnx.Dict(fc1=nn.Linear(width, inner, wide, rngs), fc2=narrow)

    def __call__(self, x, mask, *, rngs=None, return_weights=False):  # x: (batch, length, hidden)
        attn_output, weights = self.self_attn(self.layer_norm1(x), mask, rngs, return_weights)
        x = x + attn_output
        return x + self.mlp.fc2(self.act(self.mlp.fc1(self.layer_norm2(x)))), weights


class TextModel(nnx.Module):
    def __init__(self, config, rngs):
        width, init = config.hidden_size, nn.normal(0.02 * config.initializer_factor)
        layers = [Layer(config, rngs) for _ in range(config.num_hidden_layers)]
        words = nn.Embed(config.vocab_size, width, init, rngs)
        positions = nn.Embed(config.max_position_embeddings, width, init, rngs)
        self.embeddings = nnx.Dict(token_embedding=words, position_embedding=positions)
        self.encoder = nnx.Dict(layers=nn.Layers(layers))
        self.final_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.eos = config.eos_token_id

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
        if position_ids is None:
            documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
            position_ids = nn.positions_in_segments(documents)
        positions = self.embeddings.position_embedding(position_ids)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layers,
            self.embeddings.token_embedding(input_ids) + positions,
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*layer_inputs, x) if output_hidden_states else None
        x, attentions = self.final_layer_norm(x), attentions if output_attentions else None
        # Older configurations contain a wrong EOS ID, 2. In their rows, EOS is the largest ID.
        ends = input_ids if self.eos == 2 else input_ids == self.eos
        pooled = jnp.take_along_axis(x, ends.argmax(-1)[:, None, None], 1)[:, 0]
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, attentions)


class FlaxCLIPTextModel(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = CLIPTextConfig, TextModel, "text_model"


@hookimpl
def register_architectures(register):
    rules = [(r"token_embedding/embedding$", "embedding"), (r"embedding$", "table")]
    rules += [(r"(q_proj|k_proj|v_proj|fc1)/kernel$", "column"), (r"kernel$", "row")]
    rules += [(r"(q_proj|k_proj|v_proj|fc1)/bias$", "column_bias"), (r".*", "vector")]
    heads = {"Model": FlaxCLIPTextModel}
    register("clip_text_model", config=CLIPTextConfig, heads=heads, sharding=rules)
