"""An encoder of sound and a decoder of text on Flax NNX: recognition and translation of speech."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import SpeechEncoderDecoderConfig

from hfseq.modeling.base import Input
from hfseq_plugins.encoder_decoder.modeling import (
    EncoderDecoderModule,
    FlaxEncoderDecoderPreTrainedModel,
    output_options,
)
from hfseq_plugins.wav2vec2.modeling import frame_mask, output_lengths


class SpeechEncoderDecoderModule(EncoderDecoderModule):
    """The same, of sound."""

    def __init__(self, config: SpeechEncoderDecoderConfig, rngs: nnx.Rngs, **parts: Any):
        super().__init__(config, rngs, **parts)
        self.config = config.encoder

    def encode(
        self,
        inputs,
        attention_mask=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
        freeze_feature_encoder=False,
    ):
        """Run the encoder."""
        return self.encoder(
            inputs,
            attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            freeze_feature_encoder=freeze_feature_encoder,
        )

    def mask(self, encoder_mask: jax.Array | None, states: jax.Array) -> jax.Array | None:
        """Return the mask of the vectors that the sound became."""
        return (
            None
            if encoder_mask is None
            else frame_attention_mask(self.config, encoder_mask, states)
        )

    def returned_encoder_states(self, states: jax.Array) -> jax.Array:
        """Return the encoder's last states as PyTorch's class of sound does: projected."""
        return self.project(states)

    def __call__(
        self,
        inputs,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        freeze_feature_encoder=False,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        options = output_options(rngs, output_attentions, output_hidden_states)
        encoded = self.encode(
            inputs, attention_mask, freeze_feature_encoder=freeze_feature_encoder, **options
        )
        given = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(encoded, attention_mask, given, **options)


def frame_attention_mask(config: Any, attention_mask: jax.Array, states: jax.Array) -> jax.Array:
    """Return the mask of ``states`` from that of the sound."""
    return frame_mask(config, states.shape[1], attention_mask)


class FlaxSpeechEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """An encoder of sound and a decoder of text."""

    config_class = SpeechEncoderDecoderConfig
    module_class = SpeechEncoderDecoderModule
    base_model_prefix = "speech_encoder_decoder"
    main_input_name = "inputs"
    encoder_inputs = ("input_values",)

    def __call__(
        self,
        inputs,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        freeze_feature_encoder=False,
        params=None,
        dropout_rng=None,
        *,
        extra=None,
        **others,
    ):
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``inputs`` and their mask are (batch, samples), ``decoder_input_ids`` (batch, length).
        """
        return super().__call__(
            self._prepare_audio(inputs),
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            extra=extra,
            decoder_position_ids=decoder_position_ids,
            freeze_feature_encoder=freeze_feature_encoder,
            **others,
        )

    def encode(
        self,
        inputs,
        attention_mask=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        freeze_feature_encoder=False,
        params=None,
        dropout_rng=None,
        **others,
    ):
        """Run the encoder alone: sound to hidden states."""
        return super().encode(
            self._prepare_audio(inputs),
            attention_mask,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            freeze_feature_encoder=freeze_feature_encoder,
            **others,
        )

    def decode(
        self,
        decoder_input_ids,
        encoder_outputs,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run the decoder on ``encoder_outputs``; see :meth:`FlaxSeq2SeqPreTrainedModel.decode`.

        ``encoder_attention_mask`` is that of the vectors that the sound became.
        """
        return super().decode(
            decoder_input_ids,
            encoder_outputs,
            encoder_attention_mask,
            decoder_attention_mask,
            past_key_values,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            decoder_position_ids=decoder_position_ids,
            **inputs,
        )

    def encoder_mask(self, attention_mask: Input, encoder_outputs: Any) -> Input:
        """Return the mask of what the encoder gave from that of the sound."""
        if attention_mask is None:
            return None
        return frame_attention_mask(
            self.config.encoder, jnp.asarray(attention_mask), encoder_outputs[0]
        )

    def _prepare_audio(self, values: Any) -> jax.Array:
        return self.parts["encoder"]._prepare_audio(values)  # type: ignore[attr-defined]

    def _get_feat_extract_output_lengths(
        self, input_lengths: jax.Array | int, add_adapter: bool | None = None
    ) -> Any:
        """Return how many vectors become of so many samples."""
        return output_lengths(self.config.encoder, input_lengths, add_adapter)
