"""ModernBERT's decoder (Weller et al., 2025: Ettin) on Flax NNX; names are the checkpoint's.

ModernBERT with queries, keys and values apart, that sees what came before.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from transformers import ModernBertDecoderConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out
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
    """Attention to what came before, with a cache while text is written."""

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

    def __call__(self, x, angles, mask, rngs, return_weights=False):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = nn.rotate(query, angles), nn.rotate(key, angles)
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_drop(self.Wo(mixed.reshape(x.shape)), rngs), weights


class Layer(modernbert.Layer):
    """Attention and feed-forward, a norm before each; the embeddings are normed for the first."""

    attention_class = Attention


class Decoder(modernbert.ModernBert):
    """The decoder without a head."""

    layer = Layer
    output = out.FlaxBaseModelOutputWithPast

    def window(self, config: ModernBertDecoderConfig) -> tuple[int, int]:
        """Return how many tokens before it one sees: the window counts itself."""
        return config.sliding_window - 1, 0


class CausalLM(modernbert.VocabularyProjection):
    """Next-token prediction, with the word embeddings where the head is tied to them."""

    def __init__(self, config: ModernBertDecoderConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        self.lm_head = modernbert.PredictionHead(config, rngs)
        self.add_decoder(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=self.logits(self.lm_head(output.last_hidden_state)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class SequenceClassification(nnx.Module):
    """A label (or a number) for the whole sequence, by its last token that is no padding."""

    def __init__(self, config: ModernBertDecoderConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.classifier_bias
        self.model, self.pad = Decoder(config, rngs), config.pad_token_id
        self.head = modernbert.PredictionHead(config, rngs)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = linear(config, width, config.num_labels, rngs, bias, std=width**-0.5)

    def __call__(self, input_ids: jax.Array, *args: Any, rngs=None, **kwargs: Any):
        output = self.model(input_ids, *args, rngs=rngs, **kwargs)
        states = last_token_states(output.last_hidden_state, input_ids, self.pad)
        return out.FlaxSequenceClassifierOutput(
            logits=self.classifier(self.drop(self.head(states), rngs)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxModernBertDecoderPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base of the classes of ModernBERT's decoder: configuration and checkpoint names."""

    config_class = ModernBertDecoderConfig
    base_model_prefix = "model"
    weight_aliases = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"inv_freq$")


class FlaxModernBertDecoderModel(FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT's decoder without a head: hidden states."""

    module_class = Decoder


class FlaxModernBertDecoderForCausalLM(CausalGeneration, FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT's decoder with its language-modelling head."""

    module_class = CausalLM


class FlaxModernBertDecoderForSequenceClassification(FlaxModernBertDecoderPreTrainedModel):
    """ModernBERT's decoder with a classifier on the last token."""

    module_class = SequenceClassification
