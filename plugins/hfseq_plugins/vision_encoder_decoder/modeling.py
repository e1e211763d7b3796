"""An encoder of pictures and a decoder of text on Flax NNX: captions, and text in pictures."""

from __future__ import annotations

from transformers import VisionEncoderDecoderConfig

from hfseq_plugins.encoder_decoder.modeling import (
    EncoderDecoderModule,
    FlaxEncoderDecoderPreTrainedModel,
    output_options,
)


class VisionEncoderDecoderModule(EncoderDecoderModule):
    """The same, of pictures."""

    def encode(
        self, pixel_values, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        """Run the encoder."""
        return self.encoder(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def __call__(
        self,
        pixel_values,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        options = output_options(rngs, output_attentions, output_hidden_states)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(self.encode(pixel_values, **options), None, inputs, **options)


class FlaxVisionEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """An encoder of pictures and a decoder of text."""

    config_class = VisionEncoderDecoderConfig
    module_class = VisionEncoderDecoderModule
    base_model_prefix = "vision_encoder_decoder"
    main_input_name = "pixel_values"
    encoder_inputs = ("pixel_values",)

    def __call__(
        self,
        pixel_values,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
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
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``pixel_values`` (batch, channels, height, width), ``decoder_input_ids`` (batch, length).
        """
        return super().__call__(
            pixel_values,
            None,
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
            **inputs,
        )

    def encode(
        self,
        pixel_values,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
    ):
        """Run the encoder alone: pictures to hidden states."""
        return super().encode(
            pixel_values,
            None,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
        )

    def decode(
        self,
        decoder_input_ids,
        encoder_outputs,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        *,
        encoder_attention_mask=None,
        **inputs,
    ):
        """Run the decoder on ``encoder_outputs``; see :meth:`FlaxSeq2SeqPreTrainedModel.decode`."""
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
