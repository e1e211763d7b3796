"""UMT5 (Chung et al., 2023): mT5 with a relative position bias in each layer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import UMT5Config

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bart import heads
from hfseq_plugins.common import num_labels
from hfseq_plugins.t5 import modeling as t5
from hfseq_plugins.t5 import stack
from hfseq_plugins.t5.modeling import shift_tokens_right
from hfseq_plugins.t5.sharding import RULES as T5_RULES

RULES = [
    (r"(dense|classifier|qa_outputs|out_proj)/kernel$", "row_table"),
    (r"(dense|classifier|qa_outputs|out_proj)/bias$", "replicated"),
    *T5_RULES,
]


class BiasedAttention(stack.Attention):
    """Self-attention that computes the position bias from its own embeddings."""

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array | None,  # (batch, source_length, hidden)
        mask: Mask,
        bias: jax.Array | None,  # ignored
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        bias = self.position_bias(x.shape[1])
        return super().__call__(x, source, mask, bias, rngs, return_weights)


class SelfAttention(stack.SelfAttention):
    """Pre-norm self-attention with residual connection."""

    attention_class = BiasedAttention


class Block(stack.Block):
    """One layer: self-attention, cross-attention (only in the decoder) and feed-forward."""

    attention_class = SelfAttention


class Stack(stack.Stack):
    """The encoder or the decoder. Each layer has its own position bias."""

    block_class = Block
    shared_bias = False


class EncoderOnly(t5.EncoderOnly):
    """Token embeddings and encoder."""

    stack = Stack


class EncoderDecoder(t5.EncoderDecoder):
    """Encoder and decoder without a head."""

    stack = Stack
    decoder_stack = Stack


class ConditionalGeneration(t5.ConditionalGeneration):
    """Encoder and decoder with a language modeling head."""

    stack = Stack
    decoder_stack = Stack


def linear(features_in: int, features_out: int, std: float, rngs: nnx.Rngs) -> nn.Linear:
    """Returns a linear layer with a bias, and initial weights with this standard deviation."""
    return nn.Linear(features_in, features_out, nn.normal(std), rngs)


class ClassificationHead(heads.ClassificationHead):
    """Classification head of BART, with the initialization of T5."""

    def __init__(self, config: UMT5Config, rngs: nnx.Rngs):
        width, std = config.d_model, config.initializer_factor * config.d_model**-0.5
        self.dense = linear(width, width, std, rngs)
        self.out_proj = linear(width, num_labels(config), std, rngs)
        self.dropout = nn.Dropout(config.classifier_dropout)


class SequenceClassification(nnx.Module):
    """Sequence classification or regression, from the decoder's last EOS token."""

    def __init__(self, config: UMT5Config, rngs: nnx.Rngs, separate_embeddings: bool = False):
        self.transformer = EncoderDecoder(config, rngs, separate_embeddings)
        self.classification_head = ClassificationHead(config, rngs)
        self.eos_token_id = heads.eos_token_ids(config)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        *args: Any,
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the model. Returns logits, `(batch, num_labels)`.

        Raises:
            UsageError: `input_ids` and `decoder_input_ids` differ in length.
        """
        output = self.transformer(input_ids, *args, rngs=rngs, **kwargs)
        pooled = heads.last_eos_state(output.last_hidden_state, input_ids, self.eos_token_id)
        logits = self.classification_head(pooled, rngs)
        return heads.head_output(out.FlaxSeq2SeqSequenceClassifierOutput, output, logits=logits)


class TokenClassification(nnx.Module):
    """Token classification with the encoder."""

    def __init__(self, config: UMT5Config, rngs: nnx.Rngs, separate_embeddings: bool = False):
        self.transformer = EncoderOnly(config, rngs, separate_embeddings)
        self.dropout = nn.Dropout(config.classifier_dropout)
        std = config.initializer_factor
        self.classifier = linear(config.d_model, num_labels(config), std, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder. Returns logits, `(batch, length, num_labels)`."""
        output = self.transformer(
            input_ids,
            attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(self.dropout(output.last_hidden_state, rngs))
        return out.FlaxTokenClassifierOutput(logits, output.hidden_states, output.attentions)


class QuestionAnswering(EncoderDecoder):
    """Extractive question answering with the decoder."""

    def __init__(self, config: UMT5Config, rngs: nnx.Rngs, separate_embeddings: bool = False):
        super().__init__(config, rngs, separate_embeddings)
        std = config.initializer_factor * config.d_model**-0.5
        self.qa_outputs = linear(config.d_model, 2, std, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the model.

        Returns start and end logits, `(batch, target_length)`.
        """
        output = super().__call__(*args, **kwargs)
        start, end = jnp.moveaxis(self.qa_outputs(output.last_hidden_state), -1, 0)
        return heads.head_output(
            out.FlaxSeq2SeqQuestionAnsweringModelOutput,
            output,
            start_logits=start,
            end_logits=end,
        )


class FlaxUMT5Model(t5.FlaxT5Model):
    """UMT5 without a head. Returns the hidden states of decoder and encoder."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = EncoderDecoder


class FlaxUMT5ForConditionalGeneration(t5.FlaxT5ForConditionalGeneration):
    """UMT5 with a language modeling head."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = ConditionalGeneration


class FlaxUMT5ForSequenceClassification(t5.FlaxT5PreTrainedModel):
    """UMT5 for sequence classification, from the last EOS token."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = SequenceClassification


class FlaxUMT5ForTokenClassification(t5.FlaxT5EncoderModel):
    """UMT5's encoder for token classification."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = TokenClassification  # type: ignore[assignment]  # a head on the encoder


class FlaxUMT5ForQuestionAnswering(t5.FlaxT5PreTrainedModel):
    """UMT5 for extractive question answering."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = QuestionAnswering


class FlaxUMT5EncoderModel(t5.FlaxT5EncoderModel):
    """The encoder of UMT5."""

    config_class: ClassVar[Any] = UMT5Config
    module_class = EncoderOnly


__all__ = [
    "FlaxUMT5EncoderModel",
    "FlaxUMT5ForConditionalGeneration",
    "FlaxUMT5ForQuestionAnswering",
    "FlaxUMT5ForSequenceClassification",
    "FlaxUMT5ForTokenClassification",
    "FlaxUMT5Model",
    "shift_tokens_right",
]
