"""XGLM (Lin et al., 2022): a pre-norm BART decoder with sinusoidal positions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedConfig, XGLMConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartDecoderPreTrainedModel
from hfseq_plugins.bart.positions import fairseq_frequencies

#: Number of unused position embeddings at the start. Position 0 uses the embedding with this index.
OFFSET = 2


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int, pad_token_id: int | None) -> np.ndarray:
    """Returns the sinusoidal position embeddings of fairseq.

    The first half of the features are sines, the second half cosines. Angles are rounded to float32
    as in PyTorch.

    Args:
        length: Number of positions.
        width: Number of features.
        pad_token_id: Index of the position embedding that is set to zero, or `None`.

    Returns:
        A read-only float32 array, `(length, width)`.
    """
    half = width // 2
    angles = np.arange(length, dtype=np.float32)[:, None] * fairseq_frequencies(width)
    table = np.zeros((length, width), np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    if pad_token_id is not None:
        table[pad_token_id] = 0
    table.flags.writeable = False
    return table


class Positions(nnx.Module):
    """Sinusoidal position embeddings without parameters."""

    compute_dtype: Any = None

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        length = config.max_position_embeddings + OFFSET
        self.table = (length, config.d_model, config.pad_token_id)

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        vectors = jnp.take(jnp.asarray(sinusoids(*self.table)), ids + OFFSET, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class DecoderLayer(layers.DecoderLayer):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    norm_first = True

    @staticmethod
    def layer_sizes(config: PreTrainedConfig) -> tuple[int, int, float]:
        """Returns the number of heads, the feed-forward width and the LayerDrop rate."""
        return config.attention_heads, config.ffn_dim, config.layerdrop

    @staticmethod
    def has_cross_attention(config: PreTrainedConfig) -> bool:
        """Returns whether the layer attends to the output of an encoder."""
        return config.add_cross_attention


class XGLMModule(layers.Decoder):
    """XGLM decoder without a head."""

    layer, positions = DecoderLayer, Positions
    embedding_norm, norm_first = False, True

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=True, depth=config.num_layers)
        self.add_cross_attention = config.add_cross_attention

    def __call__(  # type: ignore[override]  # has its own token embeddings
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
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: XGLMConfig, rngs: nnx.Rngs):
        self.model = XGLMModule(config, rngs)
        self.lm_head = heads.untied_head(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.model(*args, **kwargs)
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head  # type: ignore[union-attr]  # the decoder has its own embedding
        logits = nn.vocabulary_logits(head, output.last_hidden_state)
        return heads.head_output(out.FlaxCausalLMOutputWithCrossAttentions, output, logits=logits)


class FlaxXGLMPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the XGLM models: configuration, checkpoint names and call signature."""

    config_class = XGLMConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    # Old checkpoints contain the computed position embeddings.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"embed_positions\.weights$")

    __call__ = FlaxBartDecoderPreTrainedModel.__call__  # type: ignore[assignment]  # signature of Transformers 4


class FlaxXGLMModel(FlaxXGLMPreTrainedModel):
    """XGLM without a head. Returns hidden states."""

    module_class = XGLMModule


class FlaxXGLMForCausalLM(CausalGeneration, FlaxXGLMPreTrainedModel):
    """XGLM with a language modeling head."""

    module_class = CausalLM
