"""T5 and T5 v1.1 (Raffel et al., 2020) on Flax NNX: heads and model classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx
from transformers import PreTrainedConfig, T5Config

from hfseq import nn
from hfseq.modeling import (
    FlaxPreTrainedModel,
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
    shift_tokens_right,
)
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.t5.stack import Stack


def token_embedding(config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Embed:
    """Returns the embedding matrix of the vocabulary."""
    init = nn.normal(config.initializer_factor)
    return nn.Embed(config.vocab_size, config.d_model, init, rngs)


class EncoderOnly(nnx.Module):
    """Token embeddings and encoder.

    Args:
        config: The configuration.
        rngs: Random number generators for the initial values.
        separate_embeddings: Whether encoder and decoder each have their own token embeddings, for
            checkpoints in which they differ. In this case, only a tied head uses the shared
            embeddings, as in PyTorch.
    """

    stack: ClassVar[type[Stack]] = Stack

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, separate_embeddings: bool = False):
        self.shared = token_embedding(config, rngs)
        self.encoder = self.stack(config, rngs)
        if separate_embeddings:
            self.encoder.embed_tokens = token_embedding(config, rngs)

    def embed(self, stack: Stack, input_ids: jax.Array) -> jax.Array:
        """Returns the token embeddings of the encoder or the decoder."""
        table = self.shared if stack.embed_tokens is None else stack.embed_tokens
        return table(input_ids)

    def encode(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.encoder(
            self.embed(self.encoder, input_ids),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    __call__ = encode


class EncoderDecoder(EncoderOnly):
    """Encoder and decoder without a head.

    Attributes:
        decoder_stack: Class of the decoder.
        output: Class of the output.
    """

    decoder_stack: ClassVar[type[Stack]] = Stack
    output: ClassVar[type[out.FlaxModelOutput]] = out.FlaxSeq2SeqModelOutput

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, separate_embeddings: bool = False):
        super().__init__(config, rngs, separate_embeddings)
        self.decoder = self.decoder_stack(config, rngs, decoder=True)
        if separate_embeddings:
            self.decoder.embed_tokens = token_embedding(config, rngs)

    def decode(
        self,
        decoder_input_ids: jax.Array,  # (batch, target_length)
        encoder_hidden_states: jax.Array,  # (batch, length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        decoder_segment_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the decoder and, if there is one, the head."""
        decoded = self.decoder(
            self.embed(self.decoder, decoder_input_ids),
            nn.visible(decoder_attention_mask, decoder_segment_ids),
            encoder_hidden_states,
            nn.visible_across(encoder_attention_mask, segment_ids, decoder_segment_ids),
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        return self.apply_head(decoded)

    def apply_head(self, decoded: out.FlaxModelOutput) -> out.FlaxModelOutput:
        """Applies the head to the decoder's output. Without a head, the output is unchanged."""
        return decoded

    def __call__(  # type: ignore[override]  # encoder and decoder
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        decoder_input_ids: jax.Array | None = None,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        decoder_segment_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options: dict[str, Any] = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        encoded = self.encode(input_ids, attention_mask, segment_ids, **options)
        decoded = self.decode(
            decoder_input_ids,  # type: ignore[arg-type]  # always passed by the model class
            encoded.last_hidden_state,
            attention_mask,
            decoder_attention_mask,
            segment_ids,
            decoder_segment_ids,
            **options,
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
    """Encoder and decoder with a language modeling head.

    In the original T5, the head is tied to the token embeddings, and its input is scaled. In T5
    v1.1 (`scale_decoder_outputs=False`), the head is not tied, and its input is not scaled.

    Args:
        config: The configuration.
        rngs: Random number generators for the initial values.
        tied: Whether the head is tied to the token embeddings. This overrides the configuration,
            for checkpoints that do not match it.
        separate_embeddings: See `EncoderOnly`.
    """

    output = out.FlaxSeq2SeqLMOutput

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        tied: bool | None = None,
        separate_embeddings: bool = False,
    ):
        super().__init__(config, rngs, separate_embeddings)
        scaled = getattr(config, "scale_decoder_outputs", False)  # not an option of mT5
        self.scale = config.d_model**-0.5 if scaled else 1.0
        tied = scaled if tied is None else tied
        sizes, init = (config.d_model, config.vocab_size), nn.normal(config.initializer_factor)
        self.lm_head = nnx.data(None) if tied else nn.Linear(*sizes, init, rngs, use_bias=False)

    def apply_head(self, decoded: out.FlaxModelOutput) -> out.FlaxModelOutput:
        """Returns the decoder's output with logits instead of hidden states."""
        head = self.shared.attend if self.lm_head is None else self.lm_head
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(head, decoded.last_hidden_state * self.scale),
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
        )


class FlaxT5PreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base class of the T5 models: configuration and checkpoint names."""

    config_class: ClassVar[type[PreTrainedConfig]] = T5Config
    base_model_prefix = "transformer"
    weight_aliases = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    # Unused position biases in old checkpoints.
    ignored_weights = (
        *FlaxPreTrainedModel.ignored_weights,
        r"EncDecAttention\.relative_attention_bias\.weight$",
    )

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        if config is not None and not config.tie_word_embeddings:
            # As in Transformers 4, a caller selects T5 v1.1 by setting tie_word_embeddings to False
            # in an existing configuration. For Transformers 5, the saved configuration also needs
            # scale_decoder_outputs=False.
            config.scale_decoder_outputs = False
        peft_config = kwargs.get("peft_config")
        if peft_config is not None and peft_config.unties(self.weight_aliases):
            if self.has_lm_head():
                kwargs["tied"] = False
            tables = ["shared.weight", *(n for n in self.weight_aliases if ".embed" in n)]
            if any(peft_config.is_fully_saved(name) for name in tables):
                kwargs["separate_embeddings"] = True
        super().__init__(config, *args, **kwargs)

    @classmethod
    def _saves_tied_tensor(cls, *_: Any) -> bool:
        return False  # the options `tied` and `separate_embeddings` of the module are used instead

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Any], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Returns whether encoder and decoder have separate token embeddings.

        As in PyTorch, this depends on the tensors of the checkpoint.
        """
        copies = cls.different_copies(tensors)
        separate = any(alias.endswith("embed_tokens.weight") for alias in copies)
        return {"separate_embeddings": True} if separate else {}

    def _fallbacks(self) -> dict[str, list[str]]:
        """Returns, for each embedding matrix, the names of the tensors to read if it is missing.

        These are the names of the other embedding matrices.
        """
        tables = ["shared.weight", *self.weight_aliases]
        return {name: [other for other in tables if other != name] for name in tables}

    def max_length(self) -> None:
        """Returns `None`, because relative positions do not limit the length."""


class FlaxT5Model(FlaxT5PreTrainedModel):
    """T5 without a head. Returns the hidden states of decoder and encoder."""

    module_class = EncoderDecoder


class FlaxT5ForConditionalGeneration(Seq2SeqGeneration, FlaxT5PreTrainedModel):
    """T5 with a language modeling head."""

    module_class = ConditionalGeneration

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Any], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Adds the option `tied`, which depends on the tensors of the checkpoint."""
        untied = "lm_head.weight" in cls.different_copies(tensors)
        return {"tied": not untied, **super().checkpoint_options(tensors, config)}


class FlaxT5EncoderModel(FlaxT5PreTrainedModel):
    """The encoder of T5."""

    module_class = EncoderOnly
    weight_aliases = {"encoder.embed_tokens.weight": "shared.weight"}
    ignored_weights = (*FlaxT5PreTrainedModel.ignored_weights, r"^decoder\.", r"^lm_head\.")

    def _fallbacks(self) -> dict[str, list[str]]:
        """Adds the decoder's embeddings, which some checkpoints contain instead of `shared`."""
        fallbacks = super()._fallbacks()
        return {name: [*names, "decoder.embed_tokens.weight"] for name, names in fallbacks.items()}

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_ids: Tokens, `(batch, length)`.
            attention_mask: Attention mask, `(batch, length)`, 0 for padding.
        """
        model_inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )


__all__ = [
    "FlaxT5EncoderModel",
    "FlaxT5ForConditionalGeneration",
    "FlaxT5Model",
    "FlaxT5PreTrainedModel",
    "shift_tokens_right",
]
