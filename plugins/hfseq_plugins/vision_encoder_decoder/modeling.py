"""Vision encoder-decoders on Flax NNX, for image captioning and text recognition (TrOCR)."""

from __future__ import annotations

from typing import Any

import jax
from transformers import VisionEncoderDecoderConfig

from hfseq.modeling.base import Input
from hfseq.modeling.seq2seq import EncoderOutputs
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.encoder_decoder.modeling import (
    EncoderDecoderModule,
    FlaxEncoderDecoderPreTrainedModel,
    output_options,
)


class VisionEncoderDecoderModule(EncoderDecoderModule):
    """An encoder-decoder with an image encoder."""

    def encode(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.encoder(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        decoder_input_ids: jax.Array | None = None,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options = output_options(rngs, output_attentions, output_hidden_states)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(self.encode(pixel_values, **options), None, inputs, **options)


class FlaxVisionEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """An image encoder and a text decoder from two checkpoints."""

    config_class = VisionEncoderDecoderConfig
    module_class = VisionEncoderDecoderModule
    base_model_prefix = "vision_encoder_decoder"
    main_input_name = "pixel_values"
    encoder_inputs = ("pixel_values",)

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        pixel_values: Input,
        decoder_input_ids: Input = None,
        decoder_attention_mask: Input = None,
        decoder_position_ids: Input = None,
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
        """Runs encoder and decoder. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            pixel_values: Images, `(batch, channels, height, width)`.
            decoder_input_ids: Target tokens, `(batch, length)`.
            decoder_attention_mask: Mask of the target, `(batch, length)`, 0 for padding.
            decoder_position_ids: Position IDs of the target, `(batch, length)`.
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

    def encode(  # type: ignore[override]  # as in Transformers 4
        self,
        pixel_values: Input,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
    ) -> Any:
        """Runs the encoder on images, `(batch, channels, height, width)`."""
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

    def decode(  # type: ignore[override]  # as in Transformers 4
        self,
        decoder_input_ids: Input,
        encoder_outputs: EncoderOutputs,
        decoder_attention_mask: Input = None,
        decoder_position_ids: Input = None,
        past_key_values: trees.Params | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        encoder_attention_mask: Input = None,
        **inputs: Any,
    ) -> Any:
        """Runs the decoder. See :meth:`FlaxSeq2SeqPreTrainedModel.decode`."""
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
