"""BART (Lewis et al., 2019) as modules: encoder-decoder, decoder alone, and each head."""

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

if TYPE_CHECKING:
    from transformers import BartConfig


class BartModule(nnx.Module):
    """Encoder and decoder without a head.

    They read one table of tokens, ``shared``. Without ``tie_word_embeddings`` each has its own, as
    in PyTorch, which keeps ``shared`` though nothing reads it.
    """

    stack_classes: ClassVar[tuple[type[Encoder], type[Decoder]]] = (Encoder, Decoder)

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.shared = token_embedding(config, rngs)
        self.add_stacks(config, rngs, separate_embeddings=not config.tie_word_embeddings)

    def add_stacks(
        self, config: BartConfig, rngs: nnx.Rngs, separate_embeddings: bool, **target: Any
    ) -> None:
        """Make encoder and decoder, which have their ``own_tables`` of tokens or share one."""
        encoder, decoder = self.stack_classes
        self.encoder = encoder(config, rngs, separate_embeddings)
        self.decoder = decoder(config, rngs, separate_embeddings, **target)

    @property
    def decoder_embedding(self) -> nn.Embed:
        """The table that the decoder reads, and a tied head multiplies with."""
        return self.shared if self.decoder.embed_tokens is None else self.decoder.embed_tokens

    def encode(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the encoder."""
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
        decoder_input_ids,
        encoder_hidden_states,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        segment_ids=None,
        decoder_segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the decoder on the encoder's output."""
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
        input_ids,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        position_ids=None,
        decoder_position_ids=None,
        segment_ids=None,
        decoder_segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        flags = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        encoded = self.encode(input_ids, attention_mask, position_ids, segment_ids, **flags)
        decoded = self.decode(
            decoder_input_ids,
            encoded.last_hidden_state,
            attention_mask,
            decoder_attention_mask,
            decoder_position_ids,
            segment_ids,
            decoder_segment_ids,
            **flags,
        )
        return seq2seq_output(decoded, encoded)


def seq2seq_output(
    decoded: out.FlaxModelOutput, encoded: out.FlaxModelOutput
) -> out.FlaxModelOutput:
    """Put what decoder and encoder return into one output."""
    return out.FlaxSeq2SeqModelOutput(
        last_hidden_state=decoded.last_hidden_state,
        decoder_hidden_states=decoded.hidden_states,
        decoder_attentions=decoded.attentions,
        cross_attentions=decoded.cross_attentions,
        encoder_last_hidden_state=encoded.last_hidden_state,
        encoder_hidden_states=encoded.hidden_states,
        encoder_attentions=encoded.attentions,
    )


def head_output(
    kind: type[out.FlaxModelOutput], output: out.FlaxModelOutput, **first: jax.Array
) -> out.FlaxModelOutput:
    """Put a head's results in the place of the last hidden state."""
    rest = {name: value for name, value in output.items() if name != "last_hidden_state"}
    return kind(**first, **rest)


class ModelWithHead(nnx.Module):
    """An encoder-decoder under its checkpoint name, with room for a head beside it."""

    module: ClassVar[type[BartModule]] = BartModule

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.model = self.module(config, rngs)

    def encode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Run the encoder."""
        return self.model.encode(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Run the decoder."""
        return self.model.decode(*args, **kwargs)


def untied_head(config: BartConfig, rngs: nnx.Rngs, size: int | None = None) -> nn.Linear | None:
    """The head's own projection, or nothing where it is tied to the table of tokens."""
    if config.tie_word_embeddings:
        return nnx.data(None)
    init = nn.normal(config.init_std)
    return nn.Linear(config.d_model, size or config.vocab_size, init, rngs, use_bias=False)


class ConditionalGeneration(ModelWithHead):
    """The next target token; ``final_logits_bias`` is added, never trained (PyTorch's buffer)."""

    make_head: ClassVar[Callable[..., Any]] = staticmethod(untied_head)

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        size = self.vocabulary(config)
        self.lm_head = self.make_head(config, rngs, size)
        self.final_logits_bias = nnx.Param(jnp.zeros((1, size)))

    @staticmethod
    def vocabulary(config: BartConfig) -> int:
        """Return the number of tokens that the head chooses from."""
        return config.vocab_size

    def logits(self, x: jax.Array) -> jax.Array:
        """Map hidden states to logits over the vocabulary."""
        head = self.model.decoder_embedding.attend if self.lm_head is None else self.lm_head
        return nn.add_bias(head(x), self.logits_bias()[0])

    def logits_bias(self) -> jax.Array:
        """Return what is added to the logits, (1, vocabulary)."""
        return jax.lax.stop_gradient(self.final_logits_bias[...])

    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Run the decoder and the head."""
        decoded = self.model.decode(*args, **kwargs)
        logits = self.logits(decoded.last_hidden_state)
        return head_output(out.FlaxCausalLMOutputWithCrossAttentions, decoded, logits=logits)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        return head_output(
            out.FlaxSeq2SeqLMOutput, output, logits=self.logits(output.last_hidden_state)
        )


class ClassificationHead(nnx.Module):
    """Dense, tanh and the labels."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.d_model, config.d_model, rngs)
        self.out_proj = dense(config, config.d_model, config.num_labels, rngs)
        self.dropout = nn.Dropout(config.classifier_dropout)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        x = jnp.tanh(self.dense(self.dropout(x, rngs)))
        return self.out_proj(self.dropout(x, rngs))


def last_eos_index(input_ids: jax.Array, eos_token_id: int | tuple[int, ...]) -> jax.Array:
    """Return where each row's last ``<eos>`` stands; rows must have equally many, and one at least.

    The rows are only checked where their values are known, not under ``jax.jit``.
    """
    ends = jnp.isin(input_ids, jnp.asarray(eos_token_id))
    if not isinstance(ends, jax.core.Tracer):
        counts = np.unique(np.asarray(ends.sum(1)))
        if len(counts) > 1:
            raise UsageError(
                "All examples must have the same number of <eos> tokens: the rows of input_ids "
                f"have {', '.join(map(str, counts))} (eos_token_id={eos_token_id})"
            )
        if 0 in counts:
            raise UsageError(
                f"There are missing <eos> tokens in input_ids (eos_token_id={eos_token_id}): end "
                "every example with one, as the tokenizer does with add_special_tokens=True"
            )
    return input_ids.shape[1] - 1 - jnp.argmax(ends[:, ::-1], axis=1)


class SequenceClassification(ModelWithHead):
    """A label (or a number) for the whole sequence, read where the decoder sees its last <eos>."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classification_head = ClassificationHead(config, rngs)
        if config.eos_token_id is None:
            raise UsageError(
                "sequence classification needs eos_token_id in the configuration: the label is "
                "read at the last <eos>"
            )
        # A tuple, since a list would be taken for a list of modules.
        self.eos_token_id = tuple(np.atleast_1d(config.eos_token_id).tolist())

    def __call__(self, input_ids: jax.Array, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        output = self.model(input_ids, *args, rngs=rngs, **kwargs)
        x = output.last_hidden_state
        if x.shape[1] != input_ids.shape[1]:
            raise UsageError(
                f"decoder_input_ids have {x.shape[1]} tokens a row, input_ids {input_ids.shape[1]}:"
                " the label is read where input_ids end, so both must have one length"
            )
        place = last_eos_index(input_ids, self.eos_token_id)
        pooled = jnp.take_along_axis(x, place[:, None, None], axis=1)[:, 0]
        logits = self.classification_head(pooled, rngs)
        return head_output(out.FlaxSeq2SeqSequenceClassifierOutput, output, logits=logits)


class QuestionAnswering(ModelWithHead):
    """The first and the last token of the answer."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.d_model, 2, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        logits = self.qa_outputs(output.last_hidden_state)
        return head_output(
            out.FlaxSeq2SeqQuestionAnsweringModelOutput,
            output,
            start_logits=logits[..., 0],
            end_logits=logits[..., 1],
        )


class DecoderOnly(nnx.Module):
    """The decoder under the name it has in a whole model."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs, own_token_embedding=True)


class CausalLM(nnx.Module):
    """The decoder alone with a head; it attends to ``encoder_hidden_states`` if they are given."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.model = DecoderOnly(config, rngs)
        self.lm_head = untied_head(config, rngs)

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
        head = self.model.decoder.embed_tokens.attend if self.lm_head is None else self.lm_head
        logits = head(output.last_hidden_state)
        return head_output(out.FlaxCausalLMOutputWithCrossAttentions, output, logits=logits)
