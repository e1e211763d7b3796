"""An encoder of pictures and an encoder of texts (Zhai et al., 2022) on Flax NNX, as CLIP has them.

Either may be of any family whose model without a head pools what it has read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from transformers import AutoConfig, PreTrainedConfig, VisionTextDualEncoderConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxCompositePreTrainedModel, FlaxPreTrainedModel
from hfseq.modeling.auto import HUB_ARGUMENTS, MODEL_ARGUMENTS, FlaxAutoModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.clip.modeling import (
    CLIP,
    FlaxCLIPPreTrainedModel,
    FlaxCLIPTextModel,
    FlaxCLIPVisionModel,
)

logger = logging.getLogger("hfseq.modeling")
#: The encoder of a side, where a checkpoint or a configuration is of the whole CLIP.
HALVES = {"vision": FlaxCLIPVisionModel, "text": FlaxCLIPTextModel}


class DualEncoder(CLIP):
    """Both encoders, their projections into one space, and how well they agree there."""

    def __init__(
        self,
        config: VisionTextDualEncoderConfig,
        rngs: nnx.Rngs,
        parts: Mapping[str, FlaxPreTrainedModel],
    ):
        for name, part in parts.items():
            setattr(self, name, part.module_class(part.config, rngs))
        self.text_projection, self.visual_projection = (
            nn.Linear(width, config.projection_dim, nn.normal(0.02), rngs, use_bias=False)
            for width in (config.text_config.hidden_size, config.vision_config.hidden_size)
        )
        self.logit_scale = nnx.Param(jnp.asarray(config.logit_scale_init_value, jnp.float32))
        # A table of types is in the configuration of those that take them.
        self.types = bool(getattr(config.text_config, "type_vocab_size", 0))

    def texts(self, ids, mask, positions, types, rngs, **asked) -> out.FlaxModelOutput:
        """Run the encoder of texts."""
        given = {"token_type_ids": types} if self.types else {}
        encoded = self.text_model(
            ids, attention_mask=mask, position_ids=positions, rngs=rngs, **given, **asked
        )
        return require_pooled(encoded, "text")

    def pictures(self, pixel_values, rngs, **asked) -> out.FlaxModelOutput:
        """Run the encoder of pictures."""
        return require_pooled(self.vision_model(pixel_values, rngs=rngs, **asked), "vision")

    def get_text_features(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        token_type_ids=None,
        *,
        rngs: Keys | None = None,
    ):
        """Return the projections of texts: (batch, projection_dim)."""
        encoded = self.texts(input_ids, attention_mask, position_ids, token_type_ids, rngs)
        return self.text_projection(encoded.pooler_output)

    def get_image_features(self, pixel_values, *, rngs: Keys | None = None):
        """Return the projections of pictures: (batch, projection_dim)."""
        return self.visual_projection(self.pictures(pixel_values, rngs).pooler_output)

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
        token_type_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        asked = {"output_attentions": output_attentions}
        asked["output_hidden_states"] = output_hidden_states
        pictures = self.pictures(pixel_values, rngs, **asked)
        texts = self.texts(input_ids, attention_mask, position_ids, token_type_ids, rngs, **asked)
        return self.contrast(texts, pictures)


def require_pooled(encoded: out.FlaxModelOutput, side: str) -> out.FlaxModelOutput:
    """Return what an encoder returned, if it has a vector for the whole of what it read."""
    if encoded.get("pooler_output") is None:
        raise UsageError(
            f"{side}_config is of a model that pools nothing, so there is no vector to compare: "
            "take one whose model without a head has a pooler_output (ViT, DINOv2, BEiT or CLIP "
            "for pictures; BERT, RoBERTa or CLIP for texts)"
        )
    return encoded


class FlaxVisionTextDualEncoderModel(FlaxCompositePreTrainedModel, FlaxCLIPPreTrainedModel):
    """An encoder of pictures and one of texts: how well what they read fits each other."""

    config_class = VisionTextDualEncoderConfig
    module_class = DualEncoder
    base_model_prefix = ""
    part_configs = {"vision_model": "vision_config", "text_model": "text_config"}

    def __init__(self, config: VisionTextDualEncoderConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.any_image_size = self.parts["vision_model"].any_image_size  # type: ignore[misc]
        self.position_table = self.parts["text_model"].position_table

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Return the model class of a side without a head."""
        if not isinstance(config, PreTrainedConfig):
            raise UsageError("VisionTextDualEncoderConfig needs a vision_config and a text_config")
        return super().part_class(name, config)

    def max_length(self) -> int | None:
        """The longest text that the encoder of texts reads."""
        return self.parts["text_model"].max_length()

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
        token_type_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids``, the mask and the types are (texts, length), ``pixel_values`` (pictures,
        channels, height, width): as many of the one as of the other, or not.
        """
        given = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def get_text_features(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        token_type_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
    ):
        """Return the projections of texts (batch, projection_dim), not normalised."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
        }
        return self._features("get_text_features", given, params, dropout_rng, train)

    @classmethod
    def from_vision_text_pretrained(
        cls,
        vision_model_name_or_path: str | None = None,
        text_model_name_or_path: str | None = None,
        *model_args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make a model of an encoder of pictures and one of texts; the projections are new.

        **Arguments:** either may be given as a model, ``vision_model=`` and ``text_model=``;
        keywords that begin with ``vision_`` or ``text_`` go to the loading of that side
        (``text_from_pt=True``), arguments of a model (``dtype``, ``seed``) to this one, and the
        others to its configuration (``projection_dim``). Of a checkpoint of CLIP that side is taken
        which is asked for.
        """
        models = {}
        for side, source in (
            ("vision", vision_model_name_or_path),
            ("text", text_model_name_or_path),
        ):
            own = {
                key.removeprefix(f"{side}_"): kwargs.pop(key)
                for key in list(kwargs)
                if key.startswith(f"{side}_")
            }
            models[side] = own.pop("model", None) or _load(side, source, model_args, own)
        made = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        config = VisionTextDualEncoderConfig.from_vision_text_configs(
            models["vision"].config, models["text"].config, **kwargs
        )
        do_init = made.pop("_do_init", True)
        model = cls(config, *model_args, **made)
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
            model if do_init else (cls(config, *model_args, _do_init=False, **made), model.params)
        )


def _load(side: str, source: str | None, model_args: tuple[Any, ...], own: dict[str, Any]) -> Any:
    """Load one side's model."""
    if source is None:
        raise ValueError(
            f"If `{side}_model` is not defined as an argument, a `{side}_model_name_or_path` has "
            "to be defined"
        )
    if own.get("config") is None:
        hub = {key: own[key] for key in HUB_ARGUMENTS if key in own}
        own["config"] = AutoConfig.from_pretrained(source, **hub)
    kind = FlaxAutoModel
    if own["config"].model_type == "clip":
        own["config"], kind = getattr(own["config"], f"{side}_config"), HALVES[side]
    return kind.from_pretrained(source, *model_args, **own)
