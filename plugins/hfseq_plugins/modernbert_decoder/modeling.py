"""ModernBERT decoder (Ettin, Weller et al., 2025). Module attributes are named as in checkpoints.

It is ModernBERT with causal attention and separate query, key and value projections.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from transformers import ModernBertDecoderConfig, PreTrainedConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.common import num_labels
from hfseq_plugins.decoder.modeling import FlaxDecoderOnlyPreTrainedModel, last_token_states
from hfseq_plugins.modernbert import modeling as modernbert
from hfseq_plugins.modernbert.modeling import linear

RULES = [
    (r"(q|k|v)_proj/kernel$", "column"),
    (r"(q|k|v)_proj/bias$", "column_bias"),
    (r"lm_head/dense/kernel$", "table"),
    *modernbert.RULES,
]


class Attention(nn.CachedAttention):
    """Causal attention with a cache."""

    causal = True

    def __init__(self, config: ModernBertDecoderConfig, rngs: nnx.Rngs):
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.kv_heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.head_dim = width // self.kv_heads
        self.q_proj, self.k_proj, self.v_proj = (
            linear(config, width, width, rngs, bias, config.initializer_range) for _ in "qkv"
        )
        self.Wo = linear(config, width, width, rngs, bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = nn.rotate(query, rotary_emb), nn.rotate(key, rotary_emb)
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
        return self.out_drop(self.Wo(attn_output.reshape(x.shape)), rngs), weights


class Layer(modernbert.Layer):
    """Pre-norm layer: attention and feed-forward. The first layer has no attention norm."""

    attention_class = Attention


class Decoder(modernbert.ModernBert):
    """Decoder without a head."""

    layer = Layer
    output = out.FlaxBaseModelOutputWithPast

    def window(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Returns how many tokens before and after its own position a query may attend to."""
        if not nn.is_causal(config):
            return config.sliding_window, config.sliding_window
        return config.sliding_window - 1, 0


class CausalLM(modernbert.VocabularyProjection):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: ModernBertDecoderConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        self.lm_head = modernbert.PredictionHead(config, rngs)
        self.add_decoder(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.model(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(
                lambda x: self.logits(self.lm_head(x)), output.last_hidden_state
            ),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class SequenceClassification(nnx.Module):
    """Sequence classification or regression, from the last token that is not padding."""

    def __init__(self, config: ModernBertDecoderConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.classifier_bias
        self.model, self.pad = Decoder(config, rngs), config.pad_token_id
        self.head = modernbert.PredictionHead(config, rngs)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = linear(config, width, num_labels(config), rngs, bias, std=width**-0.5)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        *args: Any,
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, num_labels)`."""
        output = self.model(input_ids, *args, rngs=rngs, **kwargs)
        states = last_token_states(output.last_hidden_state, input_ids, self.pad)
        return out.FlaxSequenceClassifierOutput(
            logits=self.classifier(self.drop(self.head(states), rngs)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxModernBertDecoderPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base class of the ModernBERT decoders: configuration and checkpoint names."""

    config_class = ModernBertDecoderConfig
    base_model_prefix = "model"
    weight_aliases = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"inv_freq$")


class FlaxModernBertDecoderModel(FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT decoder without a head. Returns hidden states."""

    module_class = Decoder


class FlaxModernBertDecoderForCausalLM(CausalGeneration, FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT decoder with a language modeling head."""

    module_class = CausalLM


class FlaxModernBertDecoderForSequenceClassification(FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT decoder for sequence classification, from the last token."""

    module_class = SequenceClassification
