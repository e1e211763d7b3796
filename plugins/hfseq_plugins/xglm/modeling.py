"""XGLM (Lin et al., 2022): the pre-norm decoder of BART's kind alone, with fixed places."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import XGLMConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartDecoderPreTrainedModel

OFFSET = 2  # rows before the first place


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int, pad_token_id: int | None) -> np.ndarray:
    """Return fairseq's vectors of places, (length, width): all sines, then all cosines.

    The row ``pad_token_id`` is zero. Angles are rounded as PyTorch rounds them, to float32, which
    shows at far places; only the exponential is taken of float64, since libraries differ there.
    """
    half = width // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1))
    speeds = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * speeds
    table = np.zeros((length, width), np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    if pad_token_id is not None:
        table[pad_token_id] = 0
    table.flags.writeable = False
    return table


class Positions(nnx.Module):
    """Places without parameters."""

    compute_dtype: Any = None

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        length = config.max_position_embeddings + OFFSET
        self.table = (length, config.d_model, config.pad_token_id)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the vectors of places 0, 1, 2 …: (...) to (..., features)."""
        vectors = jnp.take(jnp.asarray(sinusoids(*self.table)), ids + OFFSET, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class DecoderLayer(layers.DecoderLayer):
    """Self-attention, attention to an encoder (``add_cross_attention``), feed-forward."""

    norm_first = True

    @staticmethod
    def layer_sizes(config: XGLMConfig) -> tuple[int, int, float]:
        """Return the heads, the width of the feed-forward block, and how often it is skipped."""
        return config.attention_heads, config.ffn_dim, config.layerdrop

    @staticmethod
    def has_cross_attention(config: XGLMConfig) -> bool:
        """Tell whether there is attention to an encoder's output."""
        return config.add_cross_attention


class XGLMModule(layers.Decoder):
    """XGLM without a head."""

    layer, positions = DecoderLayer, Positions
    embedding_norm, norm_first = False, True

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=True, depth=config.num_layers)
        self.crossed = config.add_cross_attention

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
        return super().__call__(
            None,
            input_ids,
            attention_mask,
            encoder_hidden_states,
            nn.visible(encoder_attention_mask),
            position_ids,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class CausalLM(nnx.Module):
    """Next-token prediction, with the word embeddings where the head is tied to them."""

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        self.model = XGLMModule(config, rngs)
        self.lm_head = heads.untied_head(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        logits = head(output.last_hidden_state)
        return heads.head_output(out.FlaxCausalLMOutputWithCrossAttentions, output, logits=logits)


class FlaxXGLMPreTrainedModel(FlaxPreTrainedModel):
    """Base of the XGLM classes: configuration, checkpoint names and the call of Transformers 4."""

    config_class = XGLMConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    # Old checkpoints carry the computed places.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"embed_positions\.weights$")

    __call__ = FlaxBartDecoderPreTrainedModel.__call__


class FlaxXGLMModel(FlaxXGLMPreTrainedModel):
    """XGLM without a head: hidden states."""

    module_class = XGLMModule


class FlaxXGLMForCausalLM(CausalGeneration, FlaxXGLMPreTrainedModel):
    """XGLM with its language-modelling head."""

    module_class = CausalLM
