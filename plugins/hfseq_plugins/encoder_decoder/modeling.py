"""Encoder-decoders from two checkpoints (Rothe et al., 2020) on Flax NNX.

This module contains the model for text, and the base classes of all encoder-decoders from two
checkpoints. Every decoder with cross-attention is supported. If the hidden sizes differ, a newly
initialized projection connects encoder and decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import AutoConfig, EncoderDecoderConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import (
    FlaxCompositePreTrainedModel,
    FlaxPreTrainedModel,
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
)
from hfseq.modeling.auto import (
    HUB_ARGUMENTS,
    MODEL_ARGUMENTS,
    FlaxAutoModel,
    FlaxAutoModelForCausalLM,
    load,
)
from hfseq.modeling.base import Input
from hfseq.modeling.seq2seq import EncoderOutputs
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out

#: Names of cross-attention modules in parameter trees.
CROSS_ATTENTION_NAMES = ("crossattention", "encoder_attn")


def encoder_output_width(config: PreTrainedConfig) -> int:
    """Returns the number of features of an encoder's output, after the adapter if there is one."""
    has_adapter = getattr(config, "add_adapter", False)
    return config.output_hidden_size if has_adapter else config.hidden_size


def first_position(decoder: FlaxPreTrainedModel) -> int:
    """Returns the position ID of the decoder's first token. It is not 0 in RoBERTa."""
    return getattr(decoder, "first_position", 0)


def output_options(rngs: Keys | None, attentions: bool, hidden_states: bool) -> dict[str, Any]:
    """Returns keyword arguments of a call, which are the same for encoder and decoder."""
    return {
        "rngs": rngs,
        "output_attentions": attentions,
        "output_hidden_states": hidden_states,
    }


class EncoderDecoderModule(nnx.Module):
    """An encoder, and a decoder with a head. Module attributes are named as in checkpoints.

    Args:
        config: The configuration of the composite model.
        rngs: Random number generators for the initial values.
        parts: The models `encoder` and `decoder`. This module creates submodules of the same
            classes with the same configurations.
    """

    def __init__(
        self, config: PreTrainedConfig, rngs: nnx.Rngs, parts: Mapping[str, FlaxPreTrainedModel]
    ):
        encoder, decoder = parts["encoder"], parts["decoder"]
        self.encoder = encoder.module_class(encoder.config, rngs)
        self.decoder = decoder.module_class(decoder.config, rngs)
        self.decoder_accepts_positions = decoder.accepts("position_ids")
        self.padding_position = first_position(decoder) - 1
        width, decoder_width = encoder_output_width(encoder.config), decoder.config.hidden_size
        self.enc_to_dec_proj = nnx.data(None)
        if width != decoder_width and cross_attention_width(decoder.config) is None:
            init = nn.normal(getattr(decoder.config, "initializer_range", 0.02))
            self.enc_to_dec_proj = nn.Linear(width, decoder_width, init, rngs)

    def mask(self, encoder_mask: jax.Array | None, states: jax.Array) -> jax.Array | None:
        """Converts the mask of the encoder's input to a mask of its output.

        For text encoders, both masks are the same.

        Args:
            encoder_mask: Mask of the input, or `None`.
            states: The output of the encoder.
        """
        return encoder_mask

    def project(self, states: jax.Array) -> jax.Array:
        """Projects the encoder's output `(batch, length, hidden)` to the decoder's width."""
        return states if self.enc_to_dec_proj is None else self.enc_to_dec_proj(states)

    def returned_encoder_states(self, states: jax.Array) -> jax.Array:
        """Returns the value of `encoder_last_hidden_state` in the model outputs.

        Args:
            states: The output of the encoder.
        """
        return states

    def decode(
        self,
        decoder_input_ids: jax.Array,  # (batch, target_length)
        encoder_hidden_states: jax.Array,  # (batch, length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Projects the encoder's output to the decoder's width, and runs the decoder on it."""
        states = self.project(encoder_hidden_states)
        positions = decoder_position_ids
        if positions is not None and self.padding_position >= 0:
            # In RoBERTa, all padding tokens have the same position ID, which equals the token ID of
            # padding.
            positions = jnp.where(
                decoder_input_ids == self.padding_position, self.padding_position, positions
            )
        position_ids = {"position_ids": positions} if self.decoder_accepts_positions else {}
        return self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=states,
            encoder_attention_mask=encoder_attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            **position_ids,
        )

    def decode_encoded(
        self,
        encoded: out.FlaxModelOutput,
        encoder_mask: jax.Array | None,  # (batch, source_length)
        decoder_inputs: Mapping[str, Any],
        **options: Any,
    ) -> out.FlaxModelOutput:
        """Runs the decoder on the encoder's output and merges the outputs of both."""
        states = encoded.last_hidden_state
        mask = self.mask(encoder_mask, states)
        decoded = self.decode(
            encoder_hidden_states=states, encoder_attention_mask=mask, **decoder_inputs, **options
        )
        return out.FlaxSeq2SeqLMOutput(
            logits=decoded.logits,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=self.returned_encoder_states(states),
            encoder_hidden_states=encoded.get("hidden_states"),
            encoder_attentions=encoded.get("attentions"),
        )


class TextEncoderDecoderModule(EncoderDecoderModule):
    """An encoder-decoder with a text encoder."""

    def encode(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        optional = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        return self.encoder(
            input_ids,
            attention_mask=attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            **{name: value for name, value in optional.items() if value is not None},
        )

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        decoder_input_ids: jax.Array | None = None,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        position_ids: jax.Array | None = None,  # (batch, length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options = output_options(rngs, output_attentions, output_hidden_states)
        encoded = self.encode(input_ids, attention_mask, position_ids, token_type_ids, **options)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(encoded, attention_mask, inputs, **options)


def cross_attention_width(config: PreTrainedConfig) -> int | None:
    """Returns the decoder's `cross_attention_hidden_size`, an option of Transformers 4."""
    return getattr(config, "cross_attention_hidden_size", None)


class FlaxEncoderDecoderPreTrainedModel(
    Seq2SeqGeneration, FlaxCompositePreTrainedModel, FlaxSeq2SeqPreTrainedModel
):
    """Base class of the encoder-decoders from two checkpoints.

    Attributes:
        encoder_inputs: The supported values of the encoder's `main_input_name`.
    """

    part_configs = {"encoder": "encoder", "decoder": "decoder"}
    part_tasks = {"decoder": "ForCausalLM"}
    encoder_inputs: ClassVar[tuple[str, ...]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if "input_ids" not in self.encoder_inputs:  # like PyTorch's speech and vision classes
            self.config.tie_word_embeddings = False
        encoder, decoder = self.parts["encoder"], self.parts["decoder"]
        decoder_type, name = config.decoder.model_type, type(self).__name__
        if encoder.main_input_name not in self.encoder_inputs:
            raise UsageError(
                f"{name} needs an encoder with the input {' or '.join(self.encoder_inputs)}, but "
                f"the input of '{config.encoder.model_type}' is {encoder.main_input_name}"
            )
        leaves = decoder.required_params
        if not any(part in CROSS_ATTENTION_NAMES for path in leaves for part in path):
            raise UsageError(
                f"the decoder '{decoder_type}' has no cross-attention. Set is_decoder=True and "
                "add_cross_attention=True in its configuration, which the BERT family and GPT-2 "
                "support (BART's decoder always has cross-attention)"
            )
        width = cross_attention_width(config.decoder)
        if width not in (None, config.encoder.hidden_size):
            raise UsageError(
                f"the decoder's cross_attention_hidden_size is {width}, but the encoder's "
                f"hidden_size is {config.encoder.hidden_size}. Remove the option. Then a "
                "projection connects encoder and decoder"
            )

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Returns the model class of the encoder (without a head) or the decoder (with a head)."""
        if not isinstance(config, PreTrainedConfig):
            raise UsageError(f"{cls.config_class.__name__} needs an encoder and a decoder")
        if name == "encoder" and getattr(config, "is_encoder_decoder", False):
            raise UsageError(
                f"the encoder '{config.model_type}' is an encoder-decoder, but {cls.__name__} "
                "needs a model that is only an encoder"
            )
        return super().part_class(name, config)

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder."""
        return self._config.decoder

    def vocab_size(self, name: str = "input_ids") -> int | None:
        """Returns the vocabulary size of `input_ids` or `decoder_input_ids`."""
        return self.parts["encoder" if name == "input_ids" else "decoder"].vocab_size()

    def max_length(self) -> int | None:
        """Returns the maximum length of the decoder in tokens."""
        return self.parts["decoder"].max_length()

    def position_limit(self) -> int | None:
        """Returns the number of the decoder's position embeddings, or `None` if it has none."""
        return self.parts["decoder"].position_limit()

    def max_source_length(self) -> int | None:
        """Returns the maximum length of the encoder in tokens."""
        return self.parts["encoder"].max_length()

    def image_shape(self) -> tuple[int, int, int] | None:
        """Returns channels, height and width of the encoder's images."""
        return self.parts["encoder"].image_shape()

    def _check_ids(self, name: str, ids: Any) -> None:
        self.parts["encoder" if name == "input_ids" else "decoder"]._check_ids(name, ids)

    def check_images(self, images: Any) -> None:
        """Checks the images with the method of the encoder."""
        self.parts["encoder"].check_images(images)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the keyword arguments of the first call of `decode`, see the base class."""
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)
        first = first_position(self.parts["decoder"])
        return {**prepared, "decoder_position_ids": prepared["decoder_position_ids"] + first}

    @classmethod
    def from_encoder_decoder_pretrained(
        cls,
        encoder_pretrained_model_name_or_path: str | None = None,
        decoder_pretrained_model_name_or_path: str | None = None,
        *model_args: Any,
        **kwargs: Any,
    ) -> Any:
        """Creates a model from the checkpoints of an encoder and a decoder.

        Cross-attention and the projection are newly initialized if the checkpoints do not contain
        them. For training and generation, the configuration needs `decoder_start_token_id` and
        `pad_token_id`.

        Args:
            encoder_pretrained_model_name_or_path: The encoder's checkpoint. Alternatively pass a
                model as `encoder_model=`.
            decoder_pretrained_model_name_or_path: The decoder's checkpoint. Alternatively pass a
                model as `decoder_model=`.
            *model_args: Positional arguments that are passed to `from_pretrained` of encoder and
                decoder, and to the constructor of this class.
            **kwargs: Keywords that start with `encoder_` or `decoder_` apply to the encoder or the
                decoder. They are options for loading it, such as `encoder_from_pt=True`, or change
                its configuration. Model arguments such as `dtype` and `seed` apply to the new
                model. All other keywords are options of its configuration.

        Returns:
            The model. With `_do_init=False`, the model and its parameters.
        """
        sources = {
            "encoder": encoder_pretrained_model_name_or_path,
            "decoder": decoder_pretrained_model_name_or_path,
        }
        # Despite its prefix, this keyword is an option of the composite configuration.
        composite = {n: kwargs.pop(n) for n in ("decoder_start_token_id",) if n in kwargs}
        models = {}
        for part, source in sources.items():
            part_kwargs = {
                key.removeprefix(f"{part}_"): kwargs.pop(key)
                for key in list(kwargs)
                if key.startswith(f"{part}_")
            }
            models[part] = part_kwargs.pop("model", None) or _load(
                part, source, model_args, part_kwargs
            )
        model_kwargs = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        do_init = model_kwargs.pop("_do_init", True)
        encoder, decoder = (copy.deepcopy(models[part].config) for part in ("encoder", "decoder"))
        config = cls.config_class.from_encoder_decoder_configs(
            encoder, decoder, **composite, **kwargs
        )
        model = cls(config, *model_args, **model_kwargs)
        model.params = {
            **model.params,
            **{part: part_model.params for part, part_model in models.items()},
        }
        if do_init:
            return model
        return cls(config, *model_args, _do_init=False, **model_kwargs), model.params


def _load(
    part: str, source: str | None, model_args: tuple[Any, ...], part_kwargs: dict[str, Any]
) -> Any:
    """Loads the encoder or the decoder.

    If `part_kwargs` contains no `config`, cross-attention is enabled in the configuration of a
    decoder.
    """
    if source is None:
        raise ValueError(
            f"If `{part}_model` is not defined as an argument, a "
            f"`{part}_pretrained_model_name_or_path` has to be defined."
        )
    is_decoder = part == "decoder"
    if part_kwargs.get("config") is None:
        hub = {key: part_kwargs[key] for key in HUB_ARGUMENTS if key in part_kwargs}
        part_kwargs["config"] = load(AutoConfig, source, **hub)
        part_kwargs["config"].is_decoder = part_kwargs["config"].add_cross_attention = is_decoder
    auto_class = FlaxAutoModelForCausalLM if is_decoder else FlaxAutoModel
    config = part_kwargs["config"]
    changes = [n for n in part_kwargs if n not in MODEL_ARGUMENTS and hasattr(config, n)]
    for name in changes:
        setattr(config, name, part_kwargs.pop(name))
    return auto_class.from_pretrained(source, *model_args, **part_kwargs)


class FlaxEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """A text encoder and a text decoder from two checkpoints."""

    config_class = EncoderDecoderConfig
    module_class = TextEncoderDecoderModule
    base_model_prefix = "encoder_decoder"
    encoder_inputs = ("input_ids",)

    def __call__(  # type: ignore[override]  # as in Transformers 4
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
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs encoder and decoder. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_ids: Source tokens, `(batch, source_length)`.
            attention_mask: Mask of the source, `(batch, source_length)`, 0 for padding.
            decoder_input_ids: Target tokens, `(batch, target_length)`.
            decoder_attention_mask: Mask of the target, `(batch, target_length)`, 0 for padding.
            position_ids: Position IDs of the source, `(batch, source_length)`.
            decoder_position_ids: Position IDs of the target, `(batch, target_length)`.
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
            extra=extra,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            **inputs,
        )

    def encode(  # type: ignore[override]  # as in Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder on source tokens, `(batch, source_length)`."""
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
