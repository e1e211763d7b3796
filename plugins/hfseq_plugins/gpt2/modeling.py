"""GPT-2 (Radford et al., 2019) on Flax NNX; attribute names are the checkpoint's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import GPT2Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out


def conv(config: GPT2Config, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Conv1D:
    """A Conv1D with the family's initialisation."""
    return nn.Conv1D(features_in, features_out, nn.normal(config.initializer_range), rngs)


def residual_conv(config: GPT2Config, features_in: int, rngs: nnx.Rngs) -> nn.Conv1D:
    """A Conv1D that writes to the residual stream: smaller weights the more of them there are."""
    spread = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
    return nn.Conv1D(features_in, config.hidden_size, nn.normal(spread), rngs)


class Attention(nn.CachedAttention):
    """Attention of a sequence to what came before (with a cache), or to an encoder's output."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs, across: bool = False):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.causal = width // self.kv_heads, not across
        self.rate, self.upcast = config.attn_pdrop, config.reorder_and_upcast_attn
        self.scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        self.q_attn = conv(config, width, width, rngs) if across else nnx.data(None)
        self.c_attn = conv(config, width, (2 if across else 3) * width, rngs)
        self.c_proj = residual_conv(config, width, rngs)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def __call__(self, x, source, mask, rngs, damping=None, return_weights=False):
        if self.q_attn is None:
            parts = jnp.split(self.c_attn(x), 3, -1)
        else:
            parts = [self.q_attn(x), *jnp.split(self.c_attn(source), 2, -1)]
        query, key, value = (
            part.reshape(*part.shape[:2], self.kv_heads, self.head_dim) for part in parts
        )
        causal = self.causal
        if causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        if self.upcast:
            query, key, value = (part.astype(jnp.float32) for part in (query, key, value))
        if damping is not None:
            query = query * damping.astype(query.dtype)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            scale=self.scale,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.resid_dropout(self.c_proj(mixed.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        inner = config.n_inner or 4 * config.hidden_size
        self.c_fc = conv(config, config.hidden_size, inner, rngs)
        self.c_proj = residual_conv(config, inner, rngs)
        self.act = nn.activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))), rngs)


class Block(nnx.Module):
    """Norms before self-attention, cross-attention (``add_cross_attention``) and feed-forward."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

        crossed = config.add_cross_attention
        self.ln_1, self.attn = norm(), Attention(config, rngs)
        self.crossattention = Attention(config, rngs, across=True) if crossed else nnx.data(None)
        self.ln_cross_attn = norm() if crossed else nnx.data(None)
        self.ln_2, self.mlp = norm(), MLP(config, rngs)

    def __call__(self, x, mask, encoded, encoded_mask, *, rngs, damping=None, return_weights=False):
        mixed, weights = self.attn(self.ln_1(x), None, mask, rngs, damping, return_weights)
        x, cross_weights = x + mixed, None
        if encoded is not None:
            mixed, cross_weights = self.crossattention(
                self.ln_cross_attn(x), encoded, encoded_mask, rngs, damping, return_weights
            )
            x = x + mixed
        return x + self.mlp(self.ln_2(x), rngs), (weights, cross_weights)


class Transformer(nnx.Module):
    """GPT-2 without a head."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, config.hidden_size, nn.normal(config.initializer_range), rngs)

        self.wte = table(config.vocab_size)
        self.wpe = table(config.max_position_embeddings)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.depth, self.crossed = config.num_hidden_layers, config.add_cross_attention
        self.damped = config.scale_attn_by_inverse_layer_idx

    def embed(
        self,
        ids: jax.Array,
        positions: jax.Array | None,
        segments: jax.Array | None,
        rngs: Keys | None,
    ) -> jax.Array:
        """Tokens and positions; where none are given these are 0, 1, 2 … in every document."""
        if positions is None:
            whole = jnp.arange(ids.shape[1])[None]
            positions = whole if segments is None else nn.positions_in_segments(segments)
        return self.drop(self.wte(ids) + self.wpe(positions), rngs)

    def damping(self) -> dict[str, jax.Array] | None:
        """What ``scale_attn_by_inverse_layer_idx`` multiplies the scores of each layer by."""
        return {"damping": 1.0 / jnp.arange(1, self.depth + 1)} if self.damped else None

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if encoder_hidden_states is not None and not self.crossed:
            raise UsageError("encoder_hidden_states need a model with add_cross_attention=True")
        x, weights, inputs = nn.run_layers(
            self.h,
            self.embed(input_ids, position_ids, segment_ids, rngs),
            nn.visible(attention_mask, segment_ids),
            encoder_hidden_states,
            nn.visible(encoder_attention_mask),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=self.damping(),
        )
        x = self.ln_f(x)
        crossed = output_attentions and encoder_hidden_states is not None
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=tuple(own for own, _ in weights) if output_attentions else None,
            cross_attentions=tuple(other for _, other in weights) if crossed else None,
        )


class CausalLM(nnx.Module):
    """Next-token prediction, with the word embeddings where the head is tied to them."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs)
        sizes, init = (config.hidden_size, config.vocab_size), nn.normal(config.initializer_range)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else nn.Linear(*sizes, init, rngs, use_bias=False)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.transformer(*args, **kwargs)
        head = self.transformer.wte.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=head(output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            cross_attentions=output.cross_attentions,
        )


class FlaxGPT2PreTrainedModel(FlaxPreTrainedModel):
    """Base of the GPT-2 classes: configuration, checkpoint names and the call of Transformers 4."""

    config_class = GPT2Config
    base_model_prefix = "transformer"
    position_table = "n_positions"
    weight_aliases = {"lm_head.weight": "transformer.wte.weight"}
    # Old checkpoints carry the causal mask.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"\.(attn|crossattention)\.bias$")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        params=None,
        past_key_values=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` and the masks are (batch, length). ``segment_ids`` (batch, length) numbers the
        documents of packed rows, 0 being padding.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxGPT2Model(FlaxGPT2PreTrainedModel):
    """GPT-2 without a head: hidden states."""

    module_class = Transformer


class FlaxGPT2LMHeadModel(CausalGeneration, FlaxGPT2PreTrainedModel):
    """GPT-2 with its language-modelling head."""

    module_class = CausalLM
