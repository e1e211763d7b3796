"""ModernBERT (Warner et al., 2024, https://arxiv.org/abs/2412.13663): an encoder in one file."""

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ModernBertConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.nn import outputs as out

KINDS = ("full_attention", "sliding_attention")


def init(config, last=False):
    """A truncated normal distribution, narrower for what is added to the residual stream."""
    std = config.initializer_range * ((2 * config.num_hidden_layers) ** -0.5 if last else 1)
    cut = config.initializer_cutoff_factor or 3.0
    return jax.nn.initializers.truncated_normal(std, lower=-cut, upper=cut)


def norm(config):
    return nn.LayerNorm(config.hidden_size, config.norm_eps, use_bias=config.norm_bias)


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.Wqkv = nn.Linear(width, 3 * width, init(config), rngs, use_bias=bias)
        self.Wo = nn.Linear(width, width, init(config, last=True), rngs, use_bias=bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def __call__(self, x, angles, mask, rngs, return_weights):
        qkv = self.Wqkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = (qkv[:, :, part] for part in range(3))
        mixed, weights = nn.attend(
            nn.rotate(query, angles),
            nn.rotate(key, angles),
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_drop(self.Wo(mixed.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """GeGLU (Shazeer, 2020)."""

    def __init__(self, config, rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.Wi = nn.Linear(width, 2 * inner, init(config), rngs, use_bias=bias)
        self.Wo = nn.Linear(inner, width, init(config, last=True), rngs, use_bias=bias)
        self.act = nn.activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)

    def __call__(self, x, rngs):
        h, gate = jnp.split(self.Wi(x), 2, -1)
        return self.Wo(self.drop(self.act(h) * gate, rngs))


class Layer(nnx.Module):
    """The first layer has no norm before its attention; most layers see a window only."""

    def __init__(self, config, number, rngs):
        self.kind = KINDS.index(config.layer_types[number])
        self.attn_norm = norm(config) if number else nnx.data(None)
        self.attn, self.mlp = Attention(config, rngs), MLP(config, rngs)
        self.mlp_norm = norm(config)

    def __call__(self, x, angles, masks, *, rngs=None, return_weights=False):
        h = self.attn_norm(x) if self.attn_norm else x
        mixed, weights = self.attn(h, angles[self.kind], masks[self.kind], rngs, return_weights)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), rngs), weights


class ModernBert(nnx.Module):
    def __init__(self, config, rngs):
        width = config.hidden_size // config.num_attention_heads
        self.rotary = tuple(nn.Rotary(config, width, kind) for kind in KINDS)
        self.window, numbers = config.sliding_window, range(config.num_hidden_layers)
        # nnx.Dict: parts that have a name in the checkpoint and no call of their own.
        words = nn.Embed(config.vocab_size, config.hidden_size, init(config), rngs)
        self.embeddings = nnx.Dict(tok_embeddings=words, norm=norm(config))
        self.drop = nn.Dropout(config.embedding_dropout)
        self.layers = nn.Layers([Layer(config, number, rngs) for number in numbers])
        self.final_norm = norm(config)

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
        if position_ids is None:
            documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
            position_ids = nn.positions_in_segments(documents)
        x = self.embeddings.norm(self.embeddings.tok_embeddings(input_ids))
        everything = nn.visible(attention_mask, segment_ids)
        near = nn.visible(attention_mask, segment_ids, window=(self.window, self.window))
        x, weights, inputs = nn.run_layers(
            self.layers,
            self.drop(x, rngs),
            tuple(rotary(position_ids) for rotary in self.rotary),
            (everything, near),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x, weights = self.final_norm(x), weights if output_attentions else None
        return out.FlaxBaseModelOutput(x, (*inputs, x) if output_hidden_states else None, weights)


class MaskedLM(nnx.Module):
    def __init__(self, config, rngs):
        width, last, biased = config.hidden_size, init(config, last=True), config.decoder_bias
        dense = nn.Linear(width, width, last, rngs, use_bias=config.classifier_bias)
        self.model, self.head = ModernBert(config, rngs), nnx.Dict(dense=dense, norm=norm(config))
        self.act = nn.activation(config.classifier_activation)
        self.tied, sizes = config.tie_word_embeddings, (width, config.vocab_size)
        if self.tied:
            bias = {"bias": nnx.Param(jnp.zeros(config.vocab_size))} if biased else {}
            self.decoder = nnx.Dict(bias)
        else:
            self.decoder = nn.Linear(*sizes, last, rngs, use_bias=biased)

    def __call__(self, *args, masked_positions=None, **kwargs):
        encoded = self.model(*args, **kwargs)
        x = nn.gather_positions(encoded.last_hidden_state, masked_positions)
        x = self.head.norm(self.act(self.head.dense(x)))
        if self.tied:
            logits = self.model.embeddings.tok_embeddings.attend(x)
            logits = nn.add_bias(logits, self.decoder.bias[...]) if self.decoder else logits
        else:
            logits = self.decoder(x)
        return out.FlaxMaskedLMOutput(logits, encoded.hidden_states, encoded.attentions)


class FlaxModernBertModel(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = ModernBertConfig, ModernBert, "model"
    weight_aliases = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}


class FlaxModernBertForMaskedLM(FlaxModernBertModel):
    module_class = MaskedLM


RULES = [
    (r"tok_embeddings/embedding$", "embedding"),
    (r"head/dense/kernel$", "table"),
    (r"(Wqkv|Wi)/kernel$", "column"),
    (r"(Wqkv|Wi)/bias$", "column_bias"),
    (r"Wo/kernel$", "row"),
    (r"decoder/kernel$", "vocab_column"),
    (r"decoder/bias$", "vocab"),
    (r"norm/scale$|bias$", "vector"),
]


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxModernBertModel, "ForMaskedLM": FlaxModernBertForMaskedLM}
    register("modernbert", config=ModernBertConfig, heads=heads, sharding=RULES)
