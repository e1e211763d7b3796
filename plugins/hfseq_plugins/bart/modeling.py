"""The public classes of BART: a module each, checkpoint names, and the calls of Transformers 4."""

from __future__ import annotations

import copy
from typing import Any

import jax
from transformers import BartConfig

from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import (
    FlaxPreTrainedModel,
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
    shift_tokens_right,
)
from hfseq_plugins.bart import heads


class FlaxBartPreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base of the BART classes: configuration, checkpoint names and the calls of Transformers 4."""

    config_class = BartConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    }
    # Transformers 4 stored one table for both sides, tied or not.
    weight_fallbacks = {
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"(encoder|decoder)\.version$")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        position_ids=None,
        decoder_position_ids=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` (batch, source length), ``decoder_input_ids`` (batch, target length); these
        are the source shifted right if they are not given.
        """
        return super().__call__(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            **inputs,
        )

    def encode(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run the encoder alone: (batch, source length) to hidden states."""
        return super().encode(
            input_ids,
            attention_mask,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            position_ids=position_ids,
            **inputs,
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
        """Run the decoder; see :meth:`FlaxSeq2SeqPreTrainedModel.decode`."""
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

    def default_decoder_input_ids(self, input_ids: jax.Array) -> jax.Array:
        """Return ``input_ids`` shifted right, as in denoising."""
        pad, start = self.config.pad_token_id, self.config.decoder_start_token_id
        absent = [
            name
            for name, value in (("pad_token_id", pad), ("decoder_start_token_id", start))
            if value is None
        ]
        if absent:
            raise UsageError(
                f"{type(self).__name__} needs decoder_input_ids: it cannot make them of input_ids "
                f"without {' and '.join(absent)} in the configuration"
            )
        return shift_tokens_right(input_ids, pad, start)


class FlaxBartModel(FlaxBartPreTrainedModel):
    """BART without a head: hidden states of decoder and encoder."""

    module_class = heads.BartModule
    weight_aliases = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }
    weight_fallbacks = weight_aliases


class FlaxBartForConditionalGeneration(Seq2SeqGeneration, FlaxBartPreTrainedModel):
    """BART with its language-modelling head: denoising, summaries, translation."""

    module_class = heads.ConditionalGeneration


class FlaxBartForSequenceClassification(FlaxBartPreTrainedModel):
    """BART with a classifier on the decoder's last ``<eos>``."""

    module_class = heads.SequenceClassification


class FlaxBartForQuestionAnswering(FlaxBartPreTrainedModel):
    """BART that marks the span of an answer."""

    module_class = heads.QuestionAnswering


class FlaxBartDecoderPreTrainedModel(FlaxPreTrainedModel):
    """Base of BART's decoder alone; a whole model's checkpoint loads too."""

    config_class = BartConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "model.shared.weight": "model.decoder.embed_tokens.weight",
        "lm_head.weight": "model.decoder.embed_tokens.weight",
    }
    ignored_weights = FlaxBartPreTrainedModel.ignored_weights

    def __init__(self, config: BartConfig, *args: Any, **kwargs: Any):
        if config is not None:
            # A copy: the configuration of a whole model stays one.
            config = copy.deepcopy(config)
            config.is_decoder, config.is_encoder_decoder = True, False
        super().__init__(config, *args, **kwargs)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        past_key_values=None,
        dropout_rng=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` (batch, length); ``encoder_hidden_states`` (batch, source length, features).
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxBartForCausalLM(CausalGeneration, FlaxBartDecoderPreTrainedModel):
    """BART's decoder with its language-modelling head."""

    module_class = heads.CausalLM
