"""The classes of T5 and T5 v1.1: each head as a module, then its public face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flax import nnx
from transformers import T5Config

from hfseq import nn
from hfseq.modeling import (
    FlaxPreTrainedModel,
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
    shift_tokens_right,
)
from hfseq.nn import outputs as out
from hfseq_plugins.t5.stack import Stack


class EncoderOnly(nnx.Module):
    """The word embeddings and the encoder."""

    stack: ClassVar[type[Stack]] = Stack

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        init = nn.normal(config.initializer_factor)
        self.shared = nn.Embed(config.vocab_size, config.d_model, init, rngs)
        self.encoder = self.stack(config, rngs)

    def encode(
        self,
        input_ids,
        attention_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the encoder."""
        return self.encoder(
            self.shared(input_ids),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    __call__ = encode


class EncoderDecoder(EncoderOnly):
    """T5 without a head."""

    output: ClassVar[type[out.FlaxModelOutput]] = out.FlaxSeq2SeqModelOutput

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.decoder = Stack(config, rngs, decoder=True)

    def decode(
        self,
        decoder_input_ids,
        encoder_hidden_states,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        segment_ids=None,
        decoder_segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the decoder, and the head where there is one, on the encoder's hidden states."""
        decoded = self.decoder(
            self.shared(decoder_input_ids),
            nn.visible(decoder_attention_mask, decoder_segment_ids),
            encoder_hidden_states,
            nn.visible_across(encoder_attention_mask, segment_ids, decoder_segment_ids),
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        return self.finish(decoded)

    def finish(self, decoded: out.FlaxModelOutput) -> out.FlaxModelOutput:
        """Return the decoder's output as it is; a head makes logits of it."""
        return decoded

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
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
        encoded = self.encode(input_ids, attention_mask, segment_ids, **flags)
        decoded = self.decode(
            decoder_input_ids,
            encoded.last_hidden_state,
            attention_mask,
            decoder_attention_mask,
            segment_ids,
            decoder_segment_ids,
            **flags,
        )
        return self.output(
            decoded[0],
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class ConditionalGeneration(EncoderDecoder):
    """Next-token prediction in the decoder.

    The original T5 shares its head with the word embeddings and scales what goes into it; v1.1
    (``scale_decoder_outputs=False``) does neither. ``tied`` overrides the former, for checkpoints
    that do what their configuration does not say.
    """

    output = out.FlaxSeq2SeqLMOutput

    def __init__(self, config: T5Config, rngs: nnx.Rngs, tied: bool | None = None):
        super().__init__(config, rngs)
        scaled = getattr(config, "scale_decoder_outputs", False)  # mT5's has no such choice
        self.scale = config.d_model**-0.5 if scaled else 1.0
        tied = scaled if tied is None else tied
        sizes, init = (config.d_model, config.vocab_size), nn.normal(config.initializer_factor)
        self.lm_head = nnx.data(None) if tied else nn.Linear(*sizes, init, rngs, use_bias=False)

    def finish(self, decoded: out.FlaxModelOutput) -> out.FlaxModelOutput:
        """Return logits instead of hidden states."""
        head = self.shared.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=head(decoded.last_hidden_state * self.scale),
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
        )


class FlaxT5PreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base of the T5 classes: configuration and checkpoint names."""

    config_class = T5Config
    base_model_prefix = "transformer"
    weight_aliases = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    # Old checkpoints carry a table that nothing reads.
    ignored_weights = (
        *FlaxPreTrainedModel.ignored_weights,
        r"EncDecAttention\.relative_attention_bias\.weight$",
    )

    def __init__(self, config: T5Config, *args: Any, **kwargs: Any):
        if config is not None and not config.tie_word_embeddings:
            # Set after construction, it means what Transformers 4 meant by it: T5 v1.1. Saved, the
            # configuration has to say so to Transformers 5.
            config.scale_decoder_outputs = False
        super().__init__(config, *args, **kwargs)

    def max_length(self) -> None:
        """Positions are relative: nothing limits the length."""


class FlaxT5Model(FlaxT5PreTrainedModel):
    """T5 without a head: hidden states of decoder and encoder."""

    module_class = EncoderDecoder


class FlaxT5ForConditionalGeneration(Seq2SeqGeneration, FlaxT5PreTrainedModel):
    """T5 with its language-modelling head."""

    module_class = ConditionalGeneration

    @classmethod
    def checkpoint_options(cls, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tell whether the head is tied by what the checkpoint holds, as PyTorch does."""
        own = "lm_head.kernel" in tensors or _differ(tensors, "lm_head.weight", "shared.weight")
        return {"tied": not own}


class FlaxT5EncoderModel(FlaxT5PreTrainedModel):
    """The encoder of T5 alone."""

    module_class = EncoderOnly
    ignored_weights = (*FlaxT5PreTrainedModel.ignored_weights, r"^decoder\.")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the encoder; see :meth:`FlaxPreTrainedModel.run`."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )


def _differ(tensors: Mapping[str, Any], one: str, other: str, rows: int = 1024) -> bool:
    """Tell whether two matrices are both there and differ, reading no more than it takes."""
    if one not in tensors or other not in tensors:
        return False
    first, second = tensors[one], tensors[other]
    if first.shape != second.shape:
        return True
    ends = (min(start + rows, first.shape[0]) for start in range(0, first.shape[0], rows))
    parts = ((slice(max(end - rows, 0), end), slice(None)) for end in ends)
    return any(not np.array_equal(first.read(part), second.read(part)) for part in parts)


__all__ = [
    "FlaxT5EncoderModel",
    "FlaxT5ForConditionalGeneration",
    "FlaxT5Model",
    "FlaxT5PreTrainedModel",
    "shift_tokens_right",
]
