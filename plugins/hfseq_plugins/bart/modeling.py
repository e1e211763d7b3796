"""Public classes of BART."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import jax
from transformers import BartConfig, PreTrainedConfig

from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import (
    FlaxPreTrainedModel,
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
    shift_tokens_right,
)
from hfseq.modeling.base import Input
from hfseq.modeling.seq2seq import EncoderOutputs
from hfseq.nn import Keys, trees
from hfseq_plugins.bart import heads


class FlaxBartPreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base class of the BART models: configuration, checkpoint names and call signatures."""

    config_class: ClassVar[type[PreTrainedConfig]] = BartConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    }
    # Transformers 4 stored a single embedding for encoder and decoder, even if they are not tied.
    weight_fallbacks = {
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"(encoder|decoder)\.version$")

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        decoder_input_ids: Input = None,
        decoder_attention_mask: Input = None,
        position_ids: Input = None,
        decoder_position_ids: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs encoder and decoder, see `FlaxPreTrainedModel.run`.

        `input_ids` is `(batch, source_length)` and `decoder_input_ids` is `(batch, target_length)`.
        The default of `decoder_input_ids` is `input_ids` shifted right.
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

    def encode(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        output_attentions: bool | None = None,  # type: ignore[override]  # signature of Transformers 4
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,  # type: ignore[override]  # signature of Transformers 4
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder on `input_ids`, `(batch, source_length)`."""
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

    def decode(  # type: ignore[override]  # signature of Transformers 4
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
        """Runs the decoder, see `FlaxSeq2SeqPreTrainedModel.decode`."""
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

    def default_decoder_input_ids(self, input_ids: jax.Array) -> jax.Array:  # type: ignore[override]  # called with arrays only
        """Returns `input_ids` shifted right by one token, as in BART's denoising pretraining.

        Raises:
            UsageError: The configuration has no `pad_token_id` or no `decoder_start_token_id`.
        """
        pad, start = self.config.pad_token_id, self.config.decoder_start_token_id
        absent = [
            name
            for name, value in (("pad_token_id", pad), ("decoder_start_token_id", start))
            if value is None
        ]
        if absent:
            raise UsageError(
                f"{type(self).__name__} needs decoder_input_ids: they cannot be derived from "
                f"input_ids without {' and '.join(absent)} in the configuration"
            )
        return shift_tokens_right(input_ids, pad, start)


class FlaxBartModel(FlaxBartPreTrainedModel):
    """BART without a head. Returns decoder and encoder hidden states."""

    module_class = heads.BartModule
    weight_aliases = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }
    weight_fallbacks = weight_aliases


class FlaxBartForConditionalGeneration(Seq2SeqGeneration, FlaxBartPreTrainedModel):
    """BART with a language modeling head, for denoising, summarization and translation."""

    module_class = heads.ConditionalGeneration


class FlaxBartForSequenceClassification(FlaxBartPreTrainedModel):
    """BART for sequence classification, from the decoder's last `<eos>`."""

    module_class = heads.SequenceClassification


class FlaxBartForQuestionAnswering(FlaxBartPreTrainedModel):
    """BART for extractive question answering."""

    module_class = heads.QuestionAnswering


class FlaxBartDecoderPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the stand-alone BART decoder. It also loads encoder-decoder checkpoints."""

    config_class: ClassVar[type[PreTrainedConfig]] = BartConfig
    base_model_prefix = "model"
    position_table = "max_position_embeddings"
    weight_aliases = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    weight_fallbacks = {"model.decoder.embed_tokens.weight": "model.shared.weight"}
    ignored_weights = FlaxBartPreTrainedModel.ignored_weights

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        if config is not None:
            # A copy, so that the configuration of an encoder-decoder does not change.
            config = copy.deepcopy(config)
            config.is_decoder, config.is_encoder_decoder = True, False
        super().__init__(config, *args, **kwargs)

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        encoder_hidden_states: Input = None,
        encoder_attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the decoder, see `FlaxPreTrainedModel.run`.

        `input_ids` is `(batch, length)`, and `encoder_hidden_states` is `(batch, source_length,
        hidden)`.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            **inputs,
        }
        return self.run(
            model_inputs,
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
    """BART decoder with a language modeling head."""

    module_class = heads.CausalLM
