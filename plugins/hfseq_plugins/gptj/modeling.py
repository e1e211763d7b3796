"""GPT-J (Wang and Komatsuzaki, 2021) on Flax NNX. Module attributes are named as in checkpoints.

In each layer, attention and feed-forward block have the same normalized input, and their outputs
are added to the residual stream together. Rotary embeddings rotate interleaved pairs among the
first `rotary_dim` features of each head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import GPTJConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.decoder.modeling import FlaxDecoderOnlyPreTrainedModel, linear


class Attention(nn.CachedAttention):
    """Causal attention with rotary embeddings and float32 scores."""

    def __init__(self, config: GPTJConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.rate = width // self.kv_heads, config.attn_pdrop
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            linear(config, width, width, rngs, bias=False) for _ in range(4)
        )
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        query = nn.rotate(self.q_proj(x).reshape(shape), rotary_emb, interleaved=True)
        key = nn.rotate(self.k_proj(x).reshape(shape), rotary_emb, interleaved=True)
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
        return self.resid_dropout(self.out_proj(attn_output.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: GPTJConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        inner = config.n_inner or 4 * width
        self.fc_in = linear(config, width, inner, rngs, bias=True)
        self.fc_out = linear(config, inner, width, rngs, bias=True)
        self.act = nn.activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: nn.Keys | None,
    ) -> jax.Array:
        return self.dropout(self.fc_out(self.act(self.fc_in(x))), rngs)


class Block(nnx.Module):
    """One norm, followed by attention and feed-forward in parallel."""

    def __init__(self, config: GPTJConfig, rngs: nnx.Rngs):
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn, self.mlp = Attention(config, rngs), MLP(config, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        normed = self.ln_1(x)
        attn_output, weights = self.attn(normed, rotary_emb, mask, rngs, return_weights)
        return x + attn_output + self.mlp(normed, rngs), weights


class Transformer(nnx.Module):
    """GPT-J decoder without a head."""

    def __init__(self, config: GPTJConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.rotary = nn.Rotary(config, config.rotary_dim)
        self.wte = nn.Embed(config.vocab_size, width, nn.normal(config.initializer_range), rngs)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(width, config.layer_norm_epsilon)

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
        x, attentions, layer_inputs = nn.run_layers(
            self.h,
            self.drop(self.wte(input_ids), rngs),
            self.rotary(position_ids),
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


class CausalLM(nnx.Module):
    """Causal language model. The head has a bias. Its kernel may be tied to the word embeddings."""

    def __init__(self, config: GPTJConfig, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs)
        self.lm_head = linear(config, config.hidden_size, config.vocab_size, rngs, bias=True)
        if config.tie_word_embeddings:
            self.lm_head.kernel = nnx.data(None)  # type: ignore[arg-type]  # the kernel is tied

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.transformer(*args, **kwargs)

        def head(x: jax.Array) -> jax.Array:
            if self.lm_head.kernel is None:
                return self.transformer.wte.attend(x, self.lm_head.bias[...])
            return self.lm_head(x)

        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxGPTJPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base class of the GPT-J models: configuration and checkpoint names."""

    config_class = GPTJConfig
    base_model_prefix = "transformer"
    position_table = "n_positions"
    weight_aliases = {"lm_head.weight": "transformer.wte.weight"}
    ignored_weights = (
        *FlaxPreTrainedModel.ignored_weights,
        r"attn\.(masked_)?bias$",
        r"attn\.embed_positions$",
    )


class FlaxGPTJModel(FlaxGPTJPreTrainedModel):
    """GPT-J without a head. Returns hidden states."""

    module_class = Transformer


class FlaxGPTJForCausalLM(CausalGeneration, FlaxGPTJPreTrainedModel):
    """GPT-J with a language modeling head."""

    module_class = CausalLM
