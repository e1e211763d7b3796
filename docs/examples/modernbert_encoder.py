"""ModernBERT (Warner et al., 2024, https://arxiv.org/abs/2412.13663): an encoder in one file."""

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ModernBertConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.nn import outputs as out

ATTENTION_TYPES = ("full_attention", "sliding_attention")


def init(config, last=False):
    """Returns a truncated normal initializer.

    `last` reduces the standard deviation. It is used for the last Linear layer of a block.
    """
    std = config.initializer_range * ((2 * config.num_hidden_layers) ** -0.5 if last else 1)
    cutoff = config.initializer_cutoff_factor or 3.0
    return jax.nn.initializers.truncated_normal(std, lower=-cutoff, upper=cutoff)


def norm(config):
    return nn.LayerNorm(config.hidden_size, config.norm_eps, use_bias=config.norm_bias)


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.Wqkv = nn.Linear(width, 3 * width, init(config), rngs, use_bias=bias)
        self.Wo = nn.Linear(width, width, init(config, last=True), rngs, use_bias=bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def __call__(self, x, rotary_emb, mask, rngs, return_weights):  # x: (batch, length, hidden)
        qkv = self.Wqkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = (qkv[:, :, part] for part in range(3))
        attn_output, weights = nn.attend(
            nn.rotate(query, rotary_emb),
            nn.rotate(key, rotary_emb),
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_drop(self.Wo(attn_output.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """A GeGLU feed-forward block (Shazeer, 2020)."""

    def __init__(self, config, rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.Wi = nn.Linear(width, 2 * inner, init(config), rngs, use_bias=bias)
        self.Wo = nn.Linear(inner, width, init(config, last=True), rngs, use_bias=bias)
        self.act = nn.activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)

    def __call__(self, x, rngs):  # x: (batch, length, hidden)
        h, gate = jnp.split(self.Wi(x), 2, -1)
        return self.Wo(self.drop(self.act(h) * gate, rngs))


class Layer(nnx.Module):
    """A pre-norm layer. The first layer has no attention norm. Most layers use a sliding window."""

    def __init__(self, config, layer_idx, rngs):
        self.attention_type = ATTENTION_TYPES.index(config.layer_types[layer_idx])
        self.attn_norm = norm(config) if layer_idx else nnx.data(None)
        self.attn, self.mlp = Attention(config, rngs), MLP(config, rngs)
        self.mlp_norm = norm(config)

    def __call__(
        self, x, rotary_emb, masks, *, rngs=None, return_weights=False
    ):  # x: (batch, length, hidden)
        h = self.attn_norm(x) if self.attn_norm else x
        attn_output, weights = self.attn(
            h, rotary_emb[self.attention_type], masks[self.attention_type], rngs, return_weights
        )
        x = x + attn_output
        return x + self.mlp(self.mlp_norm(x), rngs), weights


class ModernBert(nnx.Module):
    def __init__(self, config, rngs):
        width = config.hidden_size // config.num_attention_heads
        self.rotary = tuple(nn.Rotary(config, width, name) for name in ATTENTION_TYPES)
        self.window, indices = config.sliding_window, range(config.num_hidden_layers)
        # nnx.Dict groups submodules under a name of the checkpoint without a separate class.
        words = nn.Embed(config.vocab_size, config.hidden_size, init(config), rngs)
        self.embeddings = nnx.Dict(tok_embeddings=words, norm=norm(config))
        self.drop = nn.Dropout(config.embedding_dropout)
        self.layers = nn.Layers([Layer(config, layer_idx, rngs) for layer_idx in indices])
        self.final_norm = norm(config)

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
        x = self.embeddings.norm(self.embeddings.tok_embeddings(input_ids))
        full_mask = nn.visible(attention_mask, segment_ids)
        window_mask = nn.visible(attention_mask, segment_ids, window=(self.window, self.window))
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            self.drop(x, rngs),
            tuple(rotary(position_ids) for rotary in self.rotary),
            (full_mask, window_mask),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x, attentions = self.final_norm(x), attentions if output_attentions else None
        return out.FlaxBaseModelOutput(
            x, (*layer_inputs, x) if output_hidden_states else None, attentions
        )


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
        outputs = self.model(*args, **kwargs)
        x = nn.gather_positions(outputs.last_hidden_state, masked_positions)
        x = self.head.norm(self.act(self.head.dense(x)))
        if self.tied:
            logits = self.model.embeddings.tok_embeddings.attend(x)
            logits = nn.add_bias(logits, self.decoder.bias[...]) if self.decoder else logits
        else:
            logits = self.decoder(x)
        return out.FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)


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
