"""BART modules (Lewis et al., 2019): encoder-decoder, stand-alone decoder and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bart.layers import Decoder, Encoder, dense, token_embedding
from hfseq_plugins.common import num_labels

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class BartModule(nnx.Module):
    """Encoder and decoder without a head.

    Encoder and decoder share the token embedding `shared`. If `config.tie_word_embeddings` is
    false, each of them has its own token embedding, and `shared` is unused, as in PyTorch.

    Attributes:
        stack_classes: Classes of the encoder and the decoder.
    """

    stack_classes: ClassVar[tuple[type[Encoder], type[Decoder]]] = (Encoder, Decoder)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.shared = token_embedding(config, rngs)
        self.add_stacks(config, rngs, separate_embeddings=not config.tie_word_embeddings)

    def add_stacks(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        separate_embeddings: bool,
        **decoder_options: Any,
    ) -> None:
        """Creates the encoder and the decoder.

        Args:
            config: Model configuration.
            rngs: Random number generators for the initial values.
            separate_embeddings: Whether encoder and decoder each have their own token embedding.
            **decoder_options: Further arguments of the decoder class.
        """
        encoder_class, decoder_class = self.stack_classes
        self.encoder = encoder_class(config, rngs, separate_embeddings)
        self.decoder = decoder_class(config, rngs, separate_embeddings, **decoder_options)

    @property
    def decoder_embedding(self) -> nn.Embed:
        """The token embedding of the decoder, which a tied head also uses."""
        return self.shared if self.decoder.embed_tokens is None else self.decoder.embed_tokens

    def encode(
        self,
        input_ids: jax.Array,  # (batch, source_length)
        attention_mask: jax.Array | None = None,  # (batch, source_length)
        position_ids: jax.Array | None = None,  # (batch, source_length)
        segment_ids: jax.Array | None = None,  # (batch, source_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.encoder(
            self.shared,
            input_ids,
            attention_mask,
            position_ids,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def decode(
        self,
        decoder_input_ids: jax.Array,  # (batch, target_length)
        encoder_hidden_states: jax.Array,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, source_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        segment_ids: jax.Array | None = None,  # (batch, source_length)
        decoder_segment_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the decoder on the output of the encoder."""
        return self.decoder(
            self.shared,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states,
            nn.visible_across(encoder_attention_mask, segment_ids, decoder_segment_ids),
            decoder_position_ids,
            decoder_segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, source_length)
        attention_mask: jax.Array | None = None,  # (batch, source_length)
        decoder_input_ids: jax.Array | None = None,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        position_ids: jax.Array | None = None,  # (batch, source_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        segment_ids: jax.Array | None = None,  # (batch, source_length)
        decoder_segment_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        flags: dict[str, Any] = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        encoder_outputs = self.encode(input_ids, attention_mask, position_ids, segment_ids, **flags)
        decoder_outputs = self.decode(
            decoder_input_ids,  # type: ignore[arg-type]  # the model class always passes it
            encoder_outputs.last_hidden_state,
            attention_mask,
            decoder_attention_mask,
            decoder_position_ids,
            segment_ids,
            decoder_segment_ids,
            **flags,
        )
        return out.seq2seq_output(decoder_outputs, encoder_outputs)


def head_output(
    output_class: type[out.FlaxModelOutput], output: out.FlaxModelOutput, **head_outputs: jax.Array
) -> out.FlaxModelOutput:
    """Replaces the last hidden state of `output` by the outputs of a head."""
    other_outputs = {name: value for name, value in output.items() if name != "last_hidden_state"}
    return output_class(**head_outputs, **other_outputs)


class ModelWithHead(nnx.Module):
    """Base class of models with a head. The encoder-decoder is the attribute `model`."""

    module: ClassVar[type[BartModule]] = BartModule

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = self.module(config, rngs)

    def encode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.model.encode(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Runs the decoder."""
        return self.model.decode(*args, **kwargs)


def untied_head(
    config: PreTrainedConfig, rngs: nnx.Rngs, size: int | None = None
) -> nn.Linear | None:
    """Returns the projection to the vocabulary, or `None` for a tied head."""
    if config.tie_word_embeddings:
        return nnx.data(None)
    init = nn.normal(config.init_std)
    return nn.Linear(config.d_model, size or config.vocab_size, init, rngs, use_bias=False)


class ConditionalGeneration(ModelWithHead):
    """Encoder-decoder with a language modeling head.

    `final_logits_bias` is added to the logits and is not trained: it is a buffer in PyTorch.
    """

    make_head: ClassVar[Callable[..., Any]] = staticmethod(untied_head)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        size = self.vocabulary(config)
        self.lm_head = self.make_head(config, rngs, size)
        self.final_logits_bias = nnx.Param(jnp.zeros((1, size)))

    @staticmethod
    def vocabulary(config: PreTrainedConfig) -> int:
        """Returns the number of tokens for which the head computes logits."""
        return config.vocab_size

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        head = self.model.decoder_embedding.attend if self.lm_head is None else self.lm_head
        return nn.add_bias(head(x), self.logits_bias()[0])

    def logits_bias(self) -> jax.Array:
        """Returns the bias of the logits, `(1, vocab_size)`."""
        return jax.lax.stop_gradient(self.final_logits_bias[...])

    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Runs the decoder and the head."""
        decoder_outputs = self.model.decode(*args, **kwargs)
        logits = nn.vocabulary_logits(self.logits, decoder_outputs.last_hidden_state)
        return head_output(
            out.FlaxCausalLMOutputWithCrossAttentions, decoder_outputs, logits=logits
        )

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the model.

        Returns logits, `(batch, target_length, vocab_size)`.
        """
        output = self.model(*args, **kwargs)
        logits = nn.vocabulary_logits(self.logits, output.last_hidden_state)
        return head_output(out.FlaxSeq2SeqLMOutput, output, logits=logits)


class ClassificationHead(nnx.Module):
    """Classification head: dropout, projection with tanh, dropout and projection to the labels."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.d_model, config.d_model, rngs)
        self.out_proj = dense(config, config.d_model, num_labels(config), rngs)
        self.dropout = nn.Dropout(config.classifier_dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        x = jnp.tanh(self.dense(self.dropout(x, rngs)))
        return self.out_proj(self.dropout(x, rngs))


def last_eos_index(input_ids: jax.Array, eos_token_id: int | tuple[int, ...]) -> jax.Array:
    """Returns the index of the last `<eos>` of each row, `(batch,)`.

    All rows must have the same number of `<eos>` tokens, and at least one. This is not checked
    under `jax.jit`, where the values of `input_ids` are unknown.

    Args:
        input_ids: Token IDs, `(batch, length)`.
        eos_token_id: ID or IDs of `<eos>`.

    Raises:
        UsageError: The number of `<eos>` tokens differs between rows, or is zero.
    """
    ends = jnp.isin(input_ids, jnp.asarray(eos_token_id))
    if not isinstance(ends, jax.core.Tracer):
        counts = np.unique(np.asarray(ends.sum(1)))
        if len(counts) > 1:
            raise UsageError(
                "All examples must have the same number of <eos> tokens, but the rows of input_ids "
                f"have {', '.join(map(str, counts))} of them (eos_token_id={eos_token_id})"
            )
        if 0 in counts:
            raise UsageError(
                f"There are missing <eos> tokens in input_ids (eos_token_id={eos_token_id}). End "
                "every example with one, as the tokenizer does with add_special_tokens=True"
            )
    return input_ids.shape[1] - 1 - jnp.argmax(ends[:, ::-1], axis=1)


def eos_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the IDs of `<eos>`.

    Raises:
        UsageError: The configuration has no `eos_token_id`.
    """
    if config.eos_token_id is None:
        raise UsageError(
            "sequence classification requires eos_token_id in the configuration: the label is "
            "predicted from the last <eos>"
        )
    # A tuple, because nnx treats a list attribute as a list of modules.
    return tuple(np.atleast_1d(config.eos_token_id).tolist())


def last_eos_state(
    x: jax.Array,  # (batch, target_length, hidden)
    input_ids: jax.Array,  # (batch, length)
    eos_token_id: tuple[int, ...],
) -> jax.Array:
    """Returns the decoder state at the index of the last `<eos>` of the input, `(batch, hidden)`.

    Raises:
        UsageError: `input_ids` and `decoder_input_ids` differ in length.
    """
    if x.shape[1] != input_ids.shape[1]:
        raise UsageError(
            f"decoder_input_ids have {x.shape[1]} tokens per row, but input_ids have "
            f"{input_ids.shape[1]}. The label is predicted at the last <eos> of input_ids, so both "
            "must have the same length"
        )
    index = last_eos_index(input_ids, eos_token_id)
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


class SequenceClassification(ModelWithHead):
    """Sequence classification or regression, from the decoder state of the last `<eos>`."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classification_head = ClassificationHead(config, rngs)
        self.eos_token_id = eos_token_ids(config)

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
        output = self.model(input_ids, *args, rngs=rngs, **kwargs)
        pooled = last_eos_state(output.last_hidden_state, input_ids, self.eos_token_id)
        logits = self.classification_head(pooled, rngs)
        return head_output(out.FlaxSeq2SeqSequenceClassifierOutput, output, logits=logits)


class QuestionAnswering(ModelWithHead):
    """Encoder-decoder with a head for extractive question answering."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.d_model, 2, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the model.

        Returns start and end logits, `(batch, target_length)`.
        """
        output = self.model(*args, **kwargs)
        logits = self.qa_outputs(output.last_hidden_state)
        return head_output(
            out.FlaxSeq2SeqQuestionAnsweringModelOutput,
            output,
            start_logits=logits[..., 0],
            end_logits=logits[..., 1],
        )


class DecoderOnly(nnx.Module):
    """Contains the decoder as the attribute `decoder`, as in encoder-decoder checkpoints."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs, own_token_embedding=True)


class CausalLM(nnx.Module):
    """Stand-alone decoder with a language modeling head.

    It attends to `encoder_hidden_states` if they are passed.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = DecoderOnly(config, rngs)
        self.lm_head = untied_head(config, rngs)

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
        output = self.model.decoder(
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
        head = self.model.decoder.embed_tokens.attend if self.lm_head is None else self.lm_head  # type: ignore[union-attr]  # the decoder has its own embedding
        logits = nn.vocabulary_logits(head, output.last_hidden_state)
        return head_output(out.FlaxCausalLMOutputWithCrossAttentions, output, logits=logits)
