"""CLIP with any image encoder and any text encoder (Zhai et al., 2022) on Flax NNX.

Each encoder may belong to any family whose model without a head returns a pooled output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import AutoConfig, PreTrainedConfig, VisionTextDualEncoderConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxCompositePreTrainedModel, FlaxPreTrainedModel
from hfseq.modeling.auto import HUB_ARGUMENTS, MODEL_ARGUMENTS, FlaxAutoModel, load
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.clip.modeling import (
    CLIP,
    FlaxCLIPPreTrainedModel,
    FlaxCLIPTextModel,
    FlaxCLIPVisionModel,
)

logger = logging.getLogger("hfseq.modeling")
#: The class that loads only the encoder of one modality from a CLIP checkpoint.
HALVES = {"vision": FlaxCLIPVisionModel, "text": FlaxCLIPTextModel}


class DualEncoder(CLIP):
    """Both encoders, their projections into a joint space, and the logit scale."""

    def __init__(
        self,
        config: VisionTextDualEncoderConfig,
        rngs: nnx.Rngs,
        parts: Mapping[str, FlaxPreTrainedModel],
    ):
        for name, part in parts.items():
            setattr(self, name, part.module_class(part.config, rngs))
        part_configs: tuple[Any, Any] = (config.text_config, config.vision_config)
        self.text_projection, self.visual_projection = (
            nn.Linear(width, config.projection_dim, nn.normal(0.02), rngs, use_bias=False)
            for width in (part_config.hidden_size for part_config in part_configs)
        )
        self.logit_scale = nnx.Param(jnp.asarray(config.logit_scale_init_value, jnp.float32))
        # The configurations of models with token types contain `type_vocab_size`.
        self.has_token_types = bool(getattr(config.text_config, "type_vocab_size", 0))

    def encode_text(
        self,
        ids: jax.Array,  # (texts, length)
        mask: jax.Array | None,  # (texts, length)
        positions: jax.Array | None,  # (texts, length)
        types: jax.Array | None,  # (texts, length)
        rngs: Keys | None,
        **options: Any,
    ) -> out.FlaxModelOutput:
        """Runs the text encoder."""
        token_types: dict[str, Any] = {"token_type_ids": types} if self.has_token_types else {}
        encoded = self.text_model(
            ids, attention_mask=mask, position_ids=positions, rngs=rngs, **token_types, **options
        )
        return require_pooled(encoded, "text")

    def encode_images(
        self,
        pixel_values: jax.Array,  # (images, channels, height, width)
        rngs: Keys | None,
        **options: Any,
    ) -> out.FlaxModelOutput:
        """Runs the image encoder."""
        return require_pooled(self.vision_model(pixel_values, rngs=rngs, **options), "vision")

    def get_text_features(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the projected text embeddings, `(texts, projection_dim)`."""
        encoded = self.encode_text(input_ids, attention_mask, position_ids, token_type_ids, rngs)
        return self.text_projection(encoded.pooler_output)

    def get_image_features(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the projected image embeddings, `(images, projection_dim)`."""
        return self.visual_projection(self.encode_images(pixel_values, rngs).pooler_output)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        pixel_values: jax.Array,  # (batch, channels, height, width)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options = {"output_attentions": output_attentions}
        options["output_hidden_states"] = output_hidden_states
        images = self.encode_images(pixel_values, rngs, **options)
        texts = self.encode_text(
            input_ids, attention_mask, position_ids, token_type_ids, rngs, **options
        )
        return self.contrast(texts, images)


def require_pooled(encoded: out.FlaxModelOutput, side: str) -> out.FlaxModelOutput:
    """Checks that an encoder's output contains a pooled output, and returns the encoder's output.

    Args:
        encoded: The output of the encoder.
        side: `"text"` or `"vision"`, for the error message.

    Raises:
        UsageError: The encoder does not pool its hidden states.
    """
    if encoded.get("pooler_output") is None:
        raise UsageError(
            f"{side}_config belongs to a model without pooling, which has no vector to compare. "
            "Use a family whose model without a head returns pooler_output (ViT, DINOv2, BEiT or "
            "CLIP for images; BERT, RoBERTa or CLIP for text)"
        )
    return encoded


class FlaxVisionTextDualEncoderModel(FlaxCompositePreTrainedModel, FlaxCLIPPreTrainedModel):
    """An image encoder and a text encoder from two checkpoints, with a joint space as in CLIP."""

    config_class = VisionTextDualEncoderConfig  # type: ignore[assignment]  # not a CLIPConfig
    module_class = DualEncoder
    base_model_prefix = ""
    part_configs = {"vision_model": "vision_config", "text_model": "text_config"}

    def __init__(self, config: VisionTextDualEncoderConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.any_image_size = self.parts["vision_model"].any_image_size  # type: ignore[misc]
        self.position_table = self.parts["text_model"].position_table

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Returns the model class of an encoder, which has no task head."""
        if not isinstance(config, PreTrainedConfig):
            raise UsageError("VisionTextDualEncoderConfig needs a vision_config and a text_config")
        return super().part_class(name, config)

    def max_length(self) -> int | None:
        """Returns the maximum length of the text encoder in tokens."""
        return self.parts["text_model"].max_length()

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_ids: Input,
        pixel_values: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        token_type_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        The numbers of texts and images may differ.

        Args:
            input_ids: Tokens, `(texts, length)`.
            pixel_values: Images, `(images, channels, height, width)`.
            attention_mask: Attention mask, `(texts, length)`, 0 for padding.
            position_ids: Position IDs, `(texts, length)`.
            token_type_ids: Token type IDs, `(texts, length)`.
        """
        inputs = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
        }
        return self.run(
            inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def get_text_features(  # type: ignore[override]  # as in Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        token_type_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
    ) -> Any:
        """Returns the projected text embeddings, `(texts, projection_dim)`, not normalized."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
        }
        return self.features("get_text_features", inputs, params, dropout_rng, train)

    @classmethod
    def from_vision_text_pretrained(
        cls,
        vision_model_name_or_path: str | None = None,
        text_model_name_or_path: str | None = None,
        *model_args: Any,
        **kwargs: Any,
    ) -> Any:
        """Creates a model from the checkpoints of an image encoder and a text encoder.

        The projections and the logit scale are newly initialized.

        Args:
            vision_model_name_or_path: The image encoder's checkpoint. If it is a CLIP model, only
                its image encoder is used. Alternatively pass a model as `vision_model=`.
            text_model_name_or_path: The text encoder's checkpoint. If it is a CLIP model, only its
                text encoder is used. Alternatively pass a model as `text_model=`.
            *model_args: Positional arguments that are passed to `from_pretrained` of both encoders,
                and to the constructor of this class.
            **kwargs: Keywords that start with `vision_` or `text_` are options for loading that
                encoder (`text_from_pt=True`). Model arguments such as `dtype` and `seed` apply to
                the new model. All other keywords are options of its configuration, such as
                `projection_dim`.

        Returns:
            The model. With `_do_init=False`, the model and its parameters.
        """
        models = {}
        for side, source in (
            ("vision", vision_model_name_or_path),
            ("text", text_model_name_or_path),
        ):
            part_kwargs = {
                key.removeprefix(f"{side}_"): kwargs.pop(key)
                for key in list(kwargs)
                if key.startswith(f"{side}_")
            }
            models[side] = part_kwargs.pop("model", None) or _load(
                side, source, model_args, part_kwargs
            )
        model_kwargs = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        config = VisionTextDualEncoderConfig.from_vision_text_configs(
            models["vision"].config, models["text"].config, **kwargs
        )
        do_init = model_kwargs.pop("_do_init", True)
        model = cls(config, *model_args, **model_kwargs)
        model.params = {
            **model.params,
            **{f"{side}_model": part.params for side, part in models.items()},
        }
        logger.warning(
            "The projection layer and logit scale weights `[('visual_projection', 'kernel'), "
            "('text_projection', 'kernel'), ('logit_scale',)]` are newly initialized. You should "
            "probably TRAIN this model on a down-stream task to be able to use it for predictions "
            "and inference."
        )
        return (
            model
            if do_init
            else (cls(config, *model_args, _do_init=False, **model_kwargs), model.params)
        )


def _load(
    side: str, source: str | None, model_args: tuple[Any, ...], part_kwargs: dict[str, Any]
) -> Any:
    """Loads the model of one encoder."""
    if source is None:
        raise ValueError(
            f"If `{side}_model` is not defined as an argument, a `{side}_model_name_or_path` has "
            "to be defined"
        )
    if part_kwargs.get("config") is None:
        hub = {key: part_kwargs[key] for key in HUB_ARGUMENTS if key in part_kwargs}
        part_kwargs["config"] = load(AutoConfig, source, **hub)
    model_class: Any = FlaxAutoModel
    if part_kwargs["config"].model_type == "clip":
        part_kwargs["config"] = getattr(part_kwargs["config"], f"{side}_config")
        model_class = HALVES[side]
    return model_class.from_pretrained(source, *model_args, **part_kwargs)
