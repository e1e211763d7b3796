"""Speech encoder-decoders on Flax NNX, for speech recognition and translation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import SpeechEncoderDecoderConfig

from hfseq.modeling.base import Input
from hfseq.modeling.seq2seq import EncoderOutputs
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.encoder_decoder.modeling import (
    EncoderDecoderModule,
    FlaxEncoderDecoderPreTrainedModel,
    output_options,
)
from hfseq_plugins.wav2vec2.modeling import frame_mask, output_lengths


class SpeechEncoderDecoderModule(EncoderDecoderModule):
    """An encoder-decoder with an audio encoder."""

    def __init__(self, config: SpeechEncoderDecoderConfig, rngs: nnx.Rngs, **parts: Any):
        super().__init__(config, rngs, **parts)
        self.config = config.encoder

    def encode(
        self,
        inputs: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        freeze_feature_encoder: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.encoder(
            inputs,
            attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            freeze_feature_encoder=freeze_feature_encoder,
        )

    def mask(self, encoder_mask: jax.Array | None, states: jax.Array) -> jax.Array | None:
        """Converts the mask of audio samples to the mask of the encoder's output frames."""
        return (
            None
            if encoder_mask is None
            else frame_attention_mask(self.config, encoder_mask, states)
        )

    def returned_encoder_states(self, states: jax.Array) -> jax.Array:
        """Returns the states after the projection, like `SpeechEncoderDecoderModel` in PyTorch."""
        return self.project(states)

    def __call__(
        self,
        inputs: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        decoder_input_ids: jax.Array | None = None,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        freeze_feature_encoder: bool = False,
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options = output_options(rngs, output_attentions, output_hidden_states)
        encoded = self.encode(
            inputs, attention_mask, freeze_feature_encoder=freeze_feature_encoder, **options
        )
        decoder_inputs = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(encoded, attention_mask, decoder_inputs, **options)


def frame_attention_mask(config: Any, attention_mask: jax.Array, states: jax.Array) -> jax.Array:
    """Converts the mask of audio samples to the mask of the encoder's output frames.

    Args:
        config: The encoder's configuration.
        attention_mask: Mask of the audio samples, `(batch, samples)`.
        states: The encoder's output, `(batch, frames, hidden)`.
    """
    return frame_mask(config, states.shape[1], attention_mask)


class FlaxSpeechEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """An audio encoder and a text decoder from two checkpoints."""

    config_class = SpeechEncoderDecoderConfig
    module_class = SpeechEncoderDecoderModule
    base_model_prefix = "speech_encoder_decoder"
    main_input_name = "inputs"
    encoder_inputs = ("input_values",)

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        inputs: Input,
        attention_mask: Input = None,
        decoder_input_ids: Input = None,
        decoder_attention_mask: Input = None,
        decoder_position_ids: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        freeze_feature_encoder: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        extra: trees.Params | None = None,
        **model_inputs: Any,
    ) -> Any:
        """Runs encoder and decoder. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            inputs: Audio samples, `(batch, samples)`.
            attention_mask: Mask of the audio samples, `(batch, samples)`, 0 for padding.
            decoder_input_ids: Target tokens, `(batch, length)`.
            decoder_attention_mask: Mask of the target, `(batch, length)`, 0 for padding.
            decoder_position_ids: Position IDs of the target, `(batch, length)`.
            freeze_feature_encoder: Whether the convolutions of the encoder get no gradient.
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
            **model_inputs,
        )

    def encode(  # type: ignore[override]  # as in Transformers 4
        self,
        inputs: Input,
        attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        freeze_feature_encoder: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **model_inputs: Any,
    ) -> Any:
        """Runs the encoder on audio samples, `(batch, samples)`."""
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
            **model_inputs,
        )

    def decode(  # type: ignore[override]  # as in Transformers 4
        self,
        decoder_input_ids: Input,
        encoder_outputs: EncoderOutputs,
        encoder_attention_mask: Input = None,
        decoder_attention_mask: Input = None,
        decoder_position_ids: Input = None,
        past_key_values: trees.Params | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the decoder. See :meth:`FlaxSeq2SeqPreTrainedModel.decode`.

        `encoder_attention_mask` is the mask of the encoder's output, `(batch, frames)`.
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
        """Converts the mask of audio samples to the mask of the encoder's output frames."""
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
        """Returns the number of frames that the encoder computes from a number of samples."""
        return output_lengths(self.config.encoder, input_lengths, add_adapter)
