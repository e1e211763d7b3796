"""An encoder and a decoder of two checkpoints (Rothe et al., 2020) on Flax NNX.

The base of the pairs is here, and that of two models of text. The decoder is any whose layers can
attend to an encoder; where the widths differ a projection stands between the two.
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
)
from hfseq.nn import Keys
from hfseq.nn import outputs as out

#: What is said of the parts of trees that attend to an encoder.
CROSS_ATTENTION_NAMES = ("crossattention", "encoder_attn")


def encoder_output_width(config: PreTrainedConfig) -> int:
    """Return the width of what an encoder gives, behind its adapter if it has one."""
    wider = getattr(config, "add_adapter", False)
    return config.output_hidden_size if wider else config.hidden_size


def first_position(decoder: FlaxPreTrainedModel) -> int:
    """Return the place of a text's first token in the decoder's table."""
    return getattr(decoder, "first_position", 0)


def output_options(rngs: Keys | None, attentions: bool, hidden_states: bool) -> dict[str, Any]:
    """Return what both sides are asked for, by name."""
    return {
        "rngs": rngs,
        "output_attentions": attentions,
        "output_hidden_states": hidden_states,
    }


class EncoderDecoderModule(nnx.Module):
    """An encoder and a decoder with a head; what they are called is the checkpoint's."""

    def __init__(
        self, config: PreTrainedConfig, rngs: nnx.Rngs, parts: Mapping[str, FlaxPreTrainedModel]
    ):
        encoder, decoder = parts["encoder"], parts["decoder"]
        self.encoder = encoder.module_class(encoder.config, rngs)
        self.decoder = decoder.module_class(decoder.config, rngs)
        self.positioned = decoder.accepts("position_ids")
        self.padding = first_position(decoder) - 1
        given, wanted = encoder_output_width(encoder.config), decoder.config.hidden_size
        self.enc_to_dec_proj = nnx.data(None)
        if given != wanted and cross_attention_width(decoder.config) is None:
            init = nn.normal(getattr(decoder.config, "initializer_range", 0.02))
            self.enc_to_dec_proj = nn.Linear(given, wanted, init, rngs)

    def mask(self, encoder_mask: jax.Array | None, states: jax.Array) -> jax.Array | None:
        """Return the mask of the encoder's output from that of its input."""
        return encoder_mask

    def project(self, states: jax.Array) -> jax.Array:
        """Bring what the encoder gave to the width of the decoder."""
        return states if self.enc_to_dec_proj is None else self.enc_to_dec_proj(states)

    def returned_encoder_states(self, states: jax.Array) -> jax.Array:
        """Return what a call tells of the encoder's last states."""
        return states

    def decode(
        self,
        decoder_input_ids,
        encoder_hidden_states,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the decoder on what the encoder gave, which is projected here."""
        states = self.project(encoder_hidden_states)
        positions = decoder_position_ids
        if positions is not None and self.padding >= 0:  # RoBERTa's padding has a place of its own
            positions = jnp.where(decoder_input_ids == self.padding, self.padding, positions)
        placed = {"position_ids": positions} if self.positioned else {}
        return self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=states,
            encoder_attention_mask=encoder_attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            **placed,
        )

    def decode_encoded(self, encoded, encoder_mask, decoder_inputs, **options):
        """Run the decoder behind ``encoded``, and return what both say."""
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
    """The same, of text."""

    def encode(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        token_type_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the encoder."""
        named = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        return self.encoder(
            input_ids,
            attention_mask=attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            **{name: value for name, value in named.items() if value is not None},
        )

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        position_ids=None,
        decoder_position_ids=None,
        token_type_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        options = output_options(rngs, output_attentions, output_hidden_states)
        encoded = self.encode(input_ids, attention_mask, position_ids, token_type_ids, **options)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
        }
        return self.decode_encoded(encoded, attention_mask, inputs, **options)


def cross_attention_width(config: PreTrainedConfig) -> int | None:
    """Return the width that a decoder says of what it attends to; Transformers 5 dropped it."""
    return getattr(config, "cross_attention_hidden_size", None)


class FlaxEncoderDecoderPreTrainedModel(
    Seq2SeqGeneration, FlaxCompositePreTrainedModel, FlaxSeq2SeqPreTrainedModel
):
    """Base of the models that an encoder and a decoder of two checkpoints make.

    ``encoder_inputs`` are the names of what an encoder of this kind reads.
    """

    part_configs = {"encoder": "encoder", "decoder": "decoder"}
    part_tasks = {"decoder": "ForCausalLM"}
    encoder_inputs: ClassVar[tuple[str, ...]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if "input_ids" not in self.encoder_inputs:  # as PyTorch's pairs of sound and of pictures
            self.config.tie_word_embeddings = False
        encoder, decoder = self.parts["encoder"], self.parts["decoder"]
        kind, name = config.decoder.model_type, type(self).__name__
        if encoder.main_input_name not in self.encoder_inputs:
            raise UsageError(
                f"{name} needs an encoder of {' or '.join(self.encoder_inputs)}, but "
                f"'{config.encoder.model_type}' reads {encoder.main_input_name}"
            )
        leaves = decoder.required_params
        if not any(part in CROSS_ATTENTION_NAMES for path in leaves for part in path):
            raise UsageError(
                f"the decoder '{kind}' does not attend to an encoder: its configuration needs "
                "is_decoder=True and add_cross_attention=True, which BERT's kin and GPT-2 obey "
                "(BART's decoder always does)"
            )
        width = cross_attention_width(config.decoder)
        if width not in (None, config.encoder.hidden_size):
            raise UsageError(
                f"the decoder's cross_attention_hidden_size is {width}, but the encoder's "
                f"hidden_size is {config.encoder.hidden_size}: leave it out, and a projection "
                "stands between the two"
            )

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Return the model class of a part: without a head, or with one over the vocabulary."""
        if not isinstance(config, PreTrainedConfig):
            raise UsageError(f"{cls.config_class.__name__} needs an encoder and a decoder")
        if name == "encoder" and getattr(config, "is_encoder_decoder", False):
            raise UsageError(
                f"the encoder '{config.model_type}' is an encoder-decoder itself: {cls.__name__} "
                "takes models that encode and do nothing else"
            )
        return super().part_class(name, config)

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder."""
        return self._config.decoder

    def vocab_size(self, name: str = "input_ids") -> int | None:
        """The number of tokens that ``input_ids`` or ``decoder_input_ids`` may hold."""
        return self.parts["encoder" if name == "input_ids" else "decoder"].vocab_size()

    def max_length(self) -> int | None:
        """The longest text that the decoder writes."""
        return self.parts["decoder"].max_length()

    def max_source_length(self) -> int | None:
        """The longest text that the encoder reads."""
        return self.parts["encoder"].max_length()

    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of pictures that the encoder reads."""
        return self.parts["encoder"].image_shape()

    def _check_ids(self, name: str, ids: Any) -> None:
        self.parts["encoder" if name == "input_ids" else "decoder"]._check_ids(name, ids)

    def _check_images(self, pictures: Any) -> None:
        self.parts["encoder"]._check_images(pictures)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the keyword arguments of the first ``decode``; see the base class."""
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
        """Make a model of an encoder and a decoder; only what lies between the two is new.

        **Arguments:** either may be given as a model, ``encoder_model=`` and ``decoder_model=``;
        keywords that begin with ``encoder_`` or ``decoder_`` go to the loading of that part
        (``encoder_from_pt=True``) or change its configuration, arguments of a model (``dtype``,
        ``seed``) go to this one, and the others to its configuration, which needs
        ``decoder_start_token_id`` and ``pad_token_id`` to train and to generate.
        """
        sources = {
            "encoder": encoder_pretrained_model_name_or_path,
            "decoder": decoder_pretrained_model_name_or_path,
        }
        # Which token begins a text is of the whole, whatever it is called.
        whole = {n: kwargs.pop(n) for n in ("decoder_start_token_id",) if n in kwargs}
        models = {}
        for part, source in sources.items():
            own = {
                key.removeprefix(f"{part}_"): kwargs.pop(key)
                for key in list(kwargs)
                if key.startswith(f"{part}_")
            }
            models[part] = own.pop("model", None) or _load(part, source, model_args, own)
        made = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        do_init = made.pop("_do_init", True)
        encoder, decoder = (copy.deepcopy(models[part].config) for part in ("encoder", "decoder"))
        config = cls.config_class.from_encoder_decoder_configs(encoder, decoder, **whole, **kwargs)
        model = cls(config, *model_args, **made)
        model.params = {**model.params, **{part: one.params for part, one in models.items()}}
        if do_init:
            return model
        return cls(config, *model_args, _do_init=False, **made), model.params


def _load(part: str, source: str | None, model_args: tuple[Any, ...], own: dict[str, Any]) -> Any:
    """Load the model of a part; a decoder becomes one that attends to an encoder."""
    if source is None:
        raise ValueError(
            f"If `{part}_model` is not defined as an argument, a "
            f"`{part}_pretrained_model_name_or_path` has to be defined."
        )
    decodes = part == "decoder"
    if own.get("config") is None:
        hub = {key: own[key] for key in HUB_ARGUMENTS if key in own}
        own["config"] = AutoConfig.from_pretrained(source, **hub)
        own["config"].is_decoder = own["config"].add_cross_attention = decodes
    kind = FlaxAutoModelForCausalLM if decodes else FlaxAutoModel
    config = own["config"]
    for name in [name for name in own if name not in MODEL_ARGUMENTS and hasattr(config, name)]:
        setattr(config, name, own.pop(name))
    return kind.from_pretrained(source, *model_args, **own)


class FlaxEncoderDecoderModel(FlaxEncoderDecoderPreTrainedModel):
    """An encoder and a decoder of text."""

    config_class = EncoderDecoderConfig
    module_class = TextEncoderDecoderModule
    base_model_prefix = "encoder_decoder"
    encoder_inputs = ("input_ids",)

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
        *,
        extra=None,
        **inputs,
    ):
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` (batch, source length) and ``decoder_input_ids`` (batch, target length).
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
