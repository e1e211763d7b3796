"""GPT-Neo (Black et al., 2021) on Flax NNX. Module attributes are named as in checkpoints.

GPT-Neo is GPT-2 with unscaled attention scores. `config.attention_layers` selects for each layer
whether it attends to all previous tokens or to a window of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import GPTNeoConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.decoder.modeling import FlaxDecoderOnlyPreTrainedModel, linear


class SelfAttention(nn.CachedAttention):
    """Causal attention with unscaled scores."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs):
        super().__init__()
        width, self.kv_heads = config.hidden_size, config.num_heads
        self.head_dim, self.rate = width // self.kv_heads, float(config.attention_dropout)
        self.k_proj, self.v_proj, self.q_proj = (
            linear(config, width, width, rngs, bias=False) for _ in range(3)
        )
        self.out_proj = linear(config, width, width, rngs, bias=True)
        self.resid_dropout = nn.Dropout(float(config.resid_dropout))

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
            scale=1.0,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.resid_dropout(self.out_proj(attn_output.reshape(x.shape)), rngs), weights


class Attention(nnx.Module):
    """Module that adds the component `attention` to parameter names, as in checkpoints."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        inner = config.intermediate_size or 4 * width
        self.c_fc = linear(config, width, inner, rngs, bias=True)
        self.c_proj = linear(config, inner, width, rngs, bias=True)
        self.act = nn.activation(config.activation_function)
        self.dropout = nn.Dropout(float(config.resid_dropout))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))), rngs)


class Block(nnx.Module):
    """Pre-norm layer: attention and feed-forward.

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        attention_type: `global` or `local`.
    """

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs, attention_type: str):
        width, epsilon, self.attention_type = (
            config.hidden_size,
            config.layer_norm_epsilon,
            attention_type,
        )
        self.ln_1, self.attn = nn.LayerNorm(width, epsilon), Attention(config, rngs)
        self.ln_2, self.mlp = nn.LayerNorm(width, epsilon), MLP(config, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        masks: Mapping[str, Mask],  # by attention type
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attn.attention(
            self.ln_1(x), masks[self.attention_type], rngs, return_weights
        )
        x = x + attn_output
        return x + self.mlp(self.ln_2(x), rngs), weights


class Transformer(nnx.Module):
    """GPT-Neo decoder without a head."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, config.hidden_size, nn.normal(config.initializer_range), rngs)

        self.wte = table(config.vocab_size)
        self.wpe = table(config.max_position_embeddings)
        self.drop = nn.Dropout(float(config.embed_dropout))
        self.h = nn.Layers(
            [Block(config, rngs, attention_type) for attention_type in config.attention_layers]
        )
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        # The configured window size includes the query's own key.
        self.windows = {"global": None, "local": (config.window_size - 1, 0)}

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
        masks = {
            attention_type: nn.visible(attention_mask, segment_ids, window=window)
            for attention_type, window in self.windows.items()
        }
        x, attentions, layer_inputs = nn.run_layers(
            self.h,
            self.drop(self.wte(input_ids) + self.wpe(position_ids), rngs),
            masks,
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
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.transformer(*args, **kwargs)
        head = self.transformer.wte.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxGPTNeoPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base class of the GPT-Neo models: configuration and checkpoint names."""

    config_class = GPTNeoConfig
    base_model_prefix = "transformer"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "transformer.wte.weight"}
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"attention\.(masked_)?bias$")

    def _apply_is_causal(self, module: nnx.Module) -> None:
        """Does nothing: attention is causal even with `is_causal=False`, as in PyTorch.

        The layers of the PyTorch class have their own causal masks and ignore this option.
        """


class FlaxGPTNeoModel(FlaxGPTNeoPreTrainedModel):
    """GPT-Neo without a head. Returns hidden states."""

    module_class = Transformer


class FlaxGPTNeoForCausalLM(CausalGeneration, FlaxGPTNeoPreTrainedModel):
    """GPT-Neo with a language modeling head."""

    module_class = CausalLM
