"""EuroBERT (Boizard et al., 2025) on Flax NNX: Llama layers with bidirectional attention.

The encoder is implemented by `hfseq_plugins.decoder`.
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
from hfseq_plugins.common import num_labels
from hfseq_plugins.decoder.modeling import Decoder, FlaxDecoderPreTrainedModel, linear

POOLINGS = ("bos", "mean", "late")


class MaskedLM(nnx.Module):
    """Encoder with a masked language modeling head."""

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        if tied and config.mlp_bias:
            raise UsageError(
                "tie_word_embeddings=True and mlp_bias=True in the configuration are not supported "
                "together: a tied head has no bias. Set one of them to False"
            )
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, config.mlp_bias)

    def __call__(
        self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any
    ) -> out.FlaxModelOutput:
        """Passes all other arguments to the encoder, then applies the head.

        Args:
            masked_positions: Indices of the `k` tokens to predict in each group of rows,
                `(groups, k)`, see `hfseq.nn.gather_positions`. The default is all tokens.

        Returns:
            Logits, `(batch, length, vocab_size)`, or `(groups, k, vocab_size)` with
                `masked_positions`.
        """
        output = self.model(*args, **kwargs)
        head = self.model.embeddings.attend if self.lm_head is None else self.lm_head
        logits = nn.vocabulary_logits(head, output.last_hidden_state, masked_positions)
        return out.FlaxMaskedLMOutput(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


class SequenceClassification(nnx.Module):
    """Encoder with a head for sequence classification or regression.

    `config.classifier_pooling` selects the first token (`bos`), the mean of all tokens (`mean`) or
    the mean of the logits of all tokens (`late`). Padding is excluded.
    """

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model, self.pooling = Decoder(config, rngs), config.classifier_pooling
        if self.pooling not in POOLINGS:
            raise UsageError(
                f"unknown classifier_pooling='{self.pooling}' in the configuration (supported: "
                f"{', '.join(POOLINGS)})"
            )
        width = config.hidden_size
        self.dense = linear(config, width, width, rngs, bias=True)
        self.classifier = linear(config, width, num_labels(config), rngs, bias=True)
        self.gelu = nn.activation("gelu")

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        *args: Any,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        output = self.model(input_ids, attention_mask, *args, **kwargs)
        x = output.last_hidden_state
        mask = jnp.ones(x.shape[:2]) if attention_mask is None else attention_mask
        weights = (mask / mask.sum(1, keepdims=True)).astype(x.dtype)[..., None]
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
    """Encoder with a token classification head."""

    def __init__(self, config: EuroBertConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        self.classifier = linear(config, config.hidden_size, num_labels(config), rngs, bias=True)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, length, num_labels)`."""
        output = self.model(*args, **kwargs)
        return out.FlaxTokenClassifierOutput(
            logits=self.classifier(output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxEuroBertPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the EuroBERT models."""

    config_class = EuroBertConfig


class FlaxEuroBertModel(FlaxEuroBertPreTrainedModel):
    """EuroBERT without a head. Returns hidden states."""

    module_class = Decoder


class FlaxEuroBertForMaskedLM(FlaxEuroBertPreTrainedModel):
    """EuroBERT with a language modeling head."""

    module_class = MaskedLM


class FlaxEuroBertForSequenceClassification(FlaxEuroBertPreTrainedModel):
    """EuroBERT for sequence classification."""

    module_class = SequenceClassification


class FlaxEuroBertForTokenClassification(FlaxEuroBertPreTrainedModel):
    """EuroBERT for token classification."""

    module_class = TokenClassification
