"""GPT-2 (Radford et al., 2019) on Flax NNX. Module attributes are named as in checkpoints."""

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
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask


def conv(config: GPT2Config, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Conv1D:
    """Returns a Conv1D with the initialization of the family."""
    return nn.Conv1D(features_in, features_out, nn.normal(config.initializer_range), rngs)


def residual_conv(config: GPT2Config, features_in: int, rngs: nnx.Rngs) -> nn.Conv1D:
    """Returns a Conv1D whose output is added to the residual stream.

    Its initial weights are smaller in models with more layers.
    """
    spread = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
    return nn.Conv1D(features_in, config.hidden_size, nn.normal(spread), rngs)


class Attention(nn.CachedAttention):
    """Causal self-attention with a cache, or cross-attention."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs, cross: bool = False):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.causal = width // self.kv_heads, not cross
        self.rate, self.upcast = config.attn_pdrop, config.reorder_and_upcast_attn
        self.scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        self.q_attn = conv(config, width, width, rngs) if cross else nnx.data(None)
        self.c_attn = conv(config, width, (2 if cross else 3) * width, rngs)
        self.c_proj = residual_conv(config, width, rngs)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array | None,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        score_scale: jax.Array | None = None,  # ()
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        if self.q_attn is None:
            parts = jnp.split(self.c_attn(x), 3, -1)
        else:
            parts = [self.q_attn(x), *jnp.split(self.c_attn(source), 2, -1)]  # type: ignore[arg-type]  # cross-attention has a source
        query, key, value = (
            part.reshape(*part.shape[:2], self.kv_heads, self.head_dim) for part in parts
        )
        causal = self.causal
        if causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        if self.upcast:
            query, key, value = (part.astype(jnp.float32) for part in (query, key, value))
        if score_scale is not None:
            query = query * score_scale.astype(query.dtype)
        attn_output, weights = nn.attend(
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
        return self.resid_dropout(self.c_proj(attn_output.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        inner = config.n_inner or 4 * config.hidden_size
        self.c_fc = conv(config, config.hidden_size, inner, rngs)
        self.c_proj = residual_conv(config, inner, rngs)
        self.act = nn.activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))), rngs)


class Block(nnx.Module):
    """Pre-norm layer: self-attention, optional cross-attention, feed-forward."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

        add_cross_attention = config.add_cross_attention
        self.ln_1, self.attn = norm(), Attention(config, rngs)
        self.crossattention = (
            Attention(config, rngs, cross=True) if add_cross_attention else nnx.data(None)
        )
        self.ln_cross_attn = norm() if add_cross_attention else nnx.data(None)
        self.ln_2, self.mlp = norm(), MLP(config, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        encoder_hidden_states: jax.Array | None,  # (batch, source_length, hidden)
        encoder_mask: Mask,
        *,
        rngs: Keys | None,
        score_scale: jax.Array | None = None,  # ()
        return_weights: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
        attn_output, weights = self.attn(
            self.ln_1(x), None, mask, rngs, score_scale, return_weights
        )
        x, cross_weights = x + attn_output, None
        if encoder_hidden_states is not None:
            attn_output, cross_weights = self.crossattention(  # type: ignore[misc]  # created in __init__
                self.ln_cross_attn(x),  # type: ignore[misc]  # created in __init__
                encoder_hidden_states,
                encoder_mask,
                rngs,
                score_scale,
                return_weights,
            )
            x = x + attn_output
        return x + self.mlp(self.ln_2(x), rngs), (weights, cross_weights)


class Transformer(nnx.Module):
    """GPT-2 decoder without a head."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, config.hidden_size, nn.normal(config.initializer_range), rngs)

        self.wte = table(config.vocab_size)
        self.wpe = table(config.max_position_embeddings)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.Layers([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.depth, self.add_cross_attention = config.num_hidden_layers, config.add_cross_attention
        self.scale_by_layer = config.scale_attn_by_inverse_layer_idx

    def embed(
        self,
        ids: jax.Array,
        positions: jax.Array | None,
        segments: jax.Array | None,
        rngs: Keys | None,
    ) -> jax.Array:
        """Embeds tokens and positions.

        Args:
            ids: Token IDs, `(batch, length)`.
            positions: Position IDs, `(batch, length)`. By default 0, 1, 2, … in each document.
            segments: Document number of each token in packed rows, `(batch, length)`, or `None`.
            rngs: PRNG keys for dropout, or `None` to disable dropout.

        Returns:
            Embeddings, `(batch, length, hidden)`.
        """
        if positions is None:
            row_positions = jnp.arange(ids.shape[1])[None]
            positions = row_positions if segments is None else nn.positions_in_segments(segments)
        return self.drop(self.wte(ids) + self.wpe(positions), rngs)

    def score_scales(self) -> dict[str, jax.Array] | None:
        """Returns the factor of the attention scores of each layer, or `None` for no scaling.

        The scaling is enabled by the option `scale_attn_by_inverse_layer_idx`.
        """
        return {"score_scale": 1.0 / jnp.arange(1, self.depth + 1)} if self.scale_by_layer else None

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        encoder_hidden_states: jax.Array | None = None,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, source_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if encoder_hidden_states is not None and not self.add_cross_attention:
            raise UsageError(
                "encoder_hidden_states require add_cross_attention=True in the configuration"
            )
        x, attentions, layer_inputs = nn.run_layers(
            self.h,
            self.embed(input_ids, position_ids, segment_ids, rngs),
            nn.visible(attention_mask, segment_ids),
            encoder_hidden_states,
            nn.visible(encoder_attention_mask),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=self.score_scales(),
        )
        x = self.ln_f(x)
        has_cross = output_attentions and encoder_hidden_states is not None
        return out.FlaxBaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=tuple(weights for weights, _ in attentions) if output_attentions else None,
            cross_attentions=tuple(weights for _, weights in attentions) if has_cross else None,
        )


class CausalLM(nnx.Module):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs)
        sizes, init = (config.hidden_size, config.vocab_size), nn.normal(config.initializer_range)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else nn.Linear(*sizes, init, rngs, use_bias=False)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.transformer(*args, **kwargs)
        head = self.transformer.wte.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            cross_attentions=output.cross_attentions,
        )


class FlaxGPT2PreTrainedModel(FlaxPreTrainedModel):
    """Base class of the GPT-2 models: configuration, checkpoint names and call signature."""

    config_class = GPT2Config
    base_model_prefix = "transformer"
    position_table = "n_positions"
    weight_aliases = {"lm_head.weight": "transformer.wte.weight"}
    # Old checkpoints contain the causal mask.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"\.(attn|crossattention)\.bias$")

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        encoder_hidden_states: Input = None,
        encoder_attention_mask: Input = None,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
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

        Token IDs, positions and masks are `(batch, length)`. For packed rows, `segment_ids`,
        `(batch, length)`, is the document number of each token, and 0 for padding.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            **inputs,
        }
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


class FlaxGPT2Model(FlaxGPT2PreTrainedModel):
    """GPT-2 without a head. Returns hidden states."""

    module_class = Transformer


class FlaxGPT2LMHeadModel(CausalGeneration, FlaxGPT2PreTrainedModel):
    """GPT-2 with a language modeling head."""

    module_class = CausalLM
