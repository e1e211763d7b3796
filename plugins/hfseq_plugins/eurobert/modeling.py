"""EuroBERT (Boizard et al., 2025) on Flax NNX: Llama's layers, and every token sees all.

A row of the table of `hfseq_plugins.decoder`, with heads of an encoder.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import EuroBertConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import outputs as out
from hfseq_plugins.decoder.modeling import Decoder, FlaxDecoderPreTrainedModel, linear

POOLINGS = ("bos", "mean", "late")


class MaskedLM(nnx.Module):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        if tied and config.mlp_bias:
            raise UsageError(
                "tie_word_embeddings and mlp_bias of the configuration: a head that is the table "
                "of words has no bias here; set one of them to False"
            )
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, config.mlp_bias)

    def __call__(self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any):
        output = self.model(*args, **kwargs)
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        states = nn.gather_positions(output.last_hidden_state, masked_positions)
        return out.FlaxMaskedLMOutput(
            logits=head(states), hidden_states=output.hidden_states, attentions=output.attentions
        )


class SequenceClassification(nnx.Module):
    """A label (or a number) for the whole sequence.

    By the configuration's ``classifier_pooling`` the first token is classified, or the mean of all,
    or all, whose scores are averaged (``late``). Padding does not count.
    """

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model, self.pooling = Decoder(config, rngs), config.classifier_pooling
        if self.pooling not in POOLINGS:
            raise UsageError(
                f"classifier_pooling='{self.pooling}' of the configuration is none of "
                f"{', '.join(POOLINGS)}"
            )
        width = config.hidden_size
        self.dense = linear(config, width, width, rngs, bias=True)
        self.classifier = linear(config, width, config.num_labels, rngs, bias=True)
        self.gelu = nn.activation("gelu")

    def __call__(self, input_ids, attention_mask=None, *args: Any, **kwargs: Any):
        output = self.model(input_ids, attention_mask, *args, **kwargs)
        x = output.last_hidden_state
        seen = jnp.ones(x.shape[:2]) if attention_mask is None else attention_mask
        weights = (seen / seen.sum(1, keepdims=True)).astype(x.dtype)[..., None]
        if self.pooling == "bos":
            x = x[:, :1]
        elif self.pooling == "mean":
            x = (x * weights).sum(1, keepdims=True)
        logits = self.classifier(self.gelu(self.dense(x)))
        logits = (logits * weights).sum(1) if self.pooling == "late" else logits[:, 0]
        return out.FlaxSequenceClassifierOutput(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


class TokenClassification(nnx.Module):
    """A label for every token."""

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        self.classifier = linear(config, config.hidden_size, config.num_labels, rngs, bias=True)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        return out.FlaxTokenClassifierOutput(
            logits=self.classifier(output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxEuroBertPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the EuroBERT classes."""

    config_class = EuroBertConfig


class FlaxEuroBertModel(FlaxEuroBertPreTrainedModel):
    """EuroBERT without a head: hidden states."""

    module_class = Decoder


class FlaxEuroBertForMaskedLM(FlaxEuroBertPreTrainedModel):
    """EuroBERT with its language-modelling head."""

    module_class = MaskedLM


class FlaxEuroBertForSequenceClassification(FlaxEuroBertPreTrainedModel):
    """EuroBERT with a classifier on the sequence."""

    module_class = SequenceClassification


class FlaxEuroBertForTokenClassification(FlaxEuroBertPreTrainedModel):
    """EuroBERT with a classifier on every token."""

    module_class = TokenClassification
