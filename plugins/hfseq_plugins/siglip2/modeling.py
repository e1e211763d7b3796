"""SigLIP 2 (Tschannen et al., 2025) on Flax NNX: SigLIP for images of any size and aspect ratio.

The image processor splits each image into patches. A row of `pixel_values` contains the patches of
one image, followed by padding. Module attributes are named as in checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import Siglip2Config, Siglip2TextConfig, Siglip2VisionConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.clip.modeling import FlaxCLIPPreTrainedModel, FlaxCLIPTextPreTrainedModel
from hfseq_plugins.siglip import modeling as siglip
from hfseq_plugins.siglip.modeling import (
    LOGIT_PART,
    TEXT_MODULES,
    TEXT_PART,
    VISION_MODULES,
    VISION_PART,
    Encoder,
    PoolingHead,
    Text,
    classifier,
    lecun_normal,
)

RULES = [(r"patch_embedding/kernel$", "table"), *siglip.RULES]


def resize_weights(grid: int, spatial_shapes: jax.Array, patches: int) -> jax.Array:
    """Returns the weights that interpolate position embeddings for the shape of each image.

    The interpolation is bilinear with antialiasing. Padding has the weights of the first patch.

    Args:
        grid: Height and width of the grid of position embeddings.
        spatial_shapes: Height and width of each image in patches, `(batch, 2)`.
        patches: Number of patches of each image, including padding.

    Returns:
        For each patch, the weights of the rows and of the columns of the grid, float32
        `(batch, patches, 2, grid)`.
    """
    sizes = spatial_shapes[:, None]  # (batch, 1, 2)
    positions = jnp.arange(patches)[None]
    rows = positions // sizes[..., 1]
    index = jnp.stack([rows, positions - rows * sizes[..., 1]], -1)
    index = jnp.where((positions < sizes.prod(-1))[..., None], index, 0)
    scale = grid / sizes.astype(jnp.float32)
    center = (index + 0.5) * scale - 0.5
    distance = jnp.abs(jnp.arange(grid) - center[..., None]) / jnp.maximum(scale, 1)[..., None]
    weights = jnp.maximum(1 - distance, 0)
    return weights / weights.sum(-1, keepdims=True)


class VisionEmbeddings(nnx.Module):
    """Projection of the patches, plus position embeddings resized to the shape of each image."""

    def __init__(self, config: Siglip2VisionConfig, rngs: nnx.Rngs):
        width, (patch_height, patch_width) = (
            config.hidden_size,
            nn.height_and_width(config.patch_size),
        )
        features = config.num_channels * patch_height * patch_width
        self.grid = int(config.num_patches**0.5)
        if self.grid**2 != config.num_patches:
            raise UsageError(
                f"num_patches={config.num_patches} in the configuration must be a square number, "
                "because the position embeddings form a square grid"
            )
        self.patch_embedding = nn.Linear(features, width, lecun_normal(features), rngs)
        init = nn.normal(width**-0.5)
        self.position_embedding = nn.Embed(config.num_patches, width, init, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, patches, features)
        spatial_shapes: jax.Array,  # (batch, 2)
    ) -> jax.Array:
        """Maps `(batch, patches, features)` to `(batch, patches, hidden)`."""
        x = self.patch_embedding(pixel_values)
        weights = resize_weights(self.grid, spatial_shapes, x.shape[1])
        table = self.position_embedding(jnp.arange(self.grid**2)).astype(jnp.float32)
        table = table.reshape(self.grid, self.grid, -1)
        rows, columns = weights[:, :, 0], weights[:, :, 1]
        positions = jnp.einsum(
            "bpi,bpj,ijh->bph", rows, columns, table, precision="highest", optimize="optimal"
        )
        return x + positions.astype(x.dtype)


class VisionTransformer(nnx.Module):
    """Image encoder."""

    def __init__(self, config: Siglip2VisionConfig, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.head = PoolingHead(config, rngs) if config.vision_use_head else nnx.data(None)  # type: ignore[arg-type]  # of another family

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, patches, features)
        pixel_attention_mask: jax.Array,  # (batch, patches)
        spatial_shapes: jax.Array,  # (batch, 2)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x, states, weights = self.encoder(
            self.embeddings(pixel_values, spatial_shapes),
            nn.visible(pixel_attention_mask),
            rngs,
            output_attentions,
            output_hidden_states,
        )
        x = self.post_layernorm(x)
        pooled = None if self.head is None else self.head(x, nn.visible(pixel_attention_mask))
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, weights)


class Vision(nnx.Module):
    """Image encoder. Its parameters are in the attribute `vision_model`, as in checkpoints."""

    def __init__(self, config: Siglip2VisionConfig, rngs: nnx.Rngs):
        self.vision_model = VisionTransformer(config, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, patches, features)
        pixel_attention_mask: jax.Array,  # (batch, patches)
        spatial_shapes: jax.Array,  # (batch, 2)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        return self.vision_model(
            pixel_values,
            pixel_attention_mask,
            spatial_shapes,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class Siglip2(siglip.Contrast):
    """Text and image encoder with a joint embedding space."""

    vision_class = VisionTransformer

    def get_image_features(
        self,
        pixel_values: jax.Array,  # (batch, patches, features)
        pixel_attention_mask: jax.Array,  # (batch, patches)
        spatial_shapes: jax.Array,  # (batch, 2)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the embeddings of images, `(batch, hidden)`."""
        outputs = self.vision_model(pixel_values, pixel_attention_mask, spatial_shapes, rngs=rngs)
        return outputs.pooler_output

    def __call__(
        self,
        input_ids: jax.Array,  # (texts, length)
        pixel_values: jax.Array,  # (images, patches, features)
        pixel_attention_mask: jax.Array,  # (images, patches)
        spatial_shapes: jax.Array,  # (images, 2)
        attention_mask: jax.Array | None = None,  # (texts, length)
        position_ids: jax.Array | None = None,  # (texts, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        flags: dict[str, Any] = {"output_attentions": output_attentions}
        flags["output_hidden_states"] = output_hidden_states
        vision_outputs = self.vision_model(
            pixel_values, pixel_attention_mask, spatial_shapes, rngs=rngs, **flags
        )
        text_outputs = self.text_model(input_ids, attention_mask, position_ids, rngs=rngs, **flags)
        return self.contrast(text_outputs, vision_outputs)


class ImageClassification(nnx.Module):
    """Image classification, from the mean of all patches that are not padding."""

    def __init__(self, config: Siglip2Config, rngs: nnx.Rngs):
        self.vision_model = VisionTransformer(config.vision_config, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.classifier = classifier(config, rngs)  # type: ignore[arg-type]  # of another family

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, patches, features)
        pixel_attention_mask: jax.Array,  # (batch, patches)
        spatial_shapes: jax.Array,  # (batch, 2)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.vision_model(
            pixel_values,
            pixel_attention_mask,
            spatial_shapes,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        mask = pixel_attention_mask[..., None].astype(outputs.last_hidden_state.dtype)
        logits = self.classifier((outputs.last_hidden_state * mask).sum(1) / mask.sum(1))
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class PatchInputs(FlaxPreTrainedModel):
    """Mixin for models whose images are sequences of patches."""

    def check_images(self, images: Any) -> None:
        """Checks the shape of `pixel_values`.

        Raises:
            UsageError: The shape is not `(batch, patches, features)`.
        """
        config = getattr(self.config, "vision_config", self.config)
        height, width = nn.height_and_width(config.patch_size)
        features, shape = config.num_channels * height * width, np.shape(images)
        if len(shape) != 3 or shape[2] != features:
            raise UsageError(
                f"pixel_values has the shape {shape}, but {type(self).__name__} requires (batch, "
                f"patches, {features}): split images into patches of {height} x {width} pixels, as "
                "the checkpoint's image processor does"
            )


class FlaxSiglip2TextModel(FlaxCLIPTextPreTrainedModel):
    """SigLIP 2 text encoder. Returns hidden states and the projected last token."""

    config_class = Siglip2TextConfig  # type: ignore[assignment]  # of another family
    module_class = Text
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, VISION_PART, LOGIT_PART)
    module_templates = {f"text_model.{name}": name for name in TEXT_MODULES}


class FlaxSiglip2VisionPreTrainedModel(PatchInputs, FlaxVisionPreTrainedModel):
    """Base class of the image models of SigLIP 2: call signature and checkpoint names."""

    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, TEXT_PART, LOGIT_PART)

    def __call__(  # type: ignore[override]  # patches have a mask and a shape
        self,
        pixel_values: Input,
        pixel_attention_mask: Input,
        spatial_shapes: Input,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model. `FlaxPreTrainedModel.run` describes the other arguments.

        `pixel_values` is `(batch, patches, features)`. `pixel_attention_mask`, `(batch, patches)`,
        is 0 for padding. `spatial_shapes`, `(batch, 2)`, contains the height and width of each
        image in patches.
        """
        return super().__call__(
            pixel_values,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
            pixel_attention_mask=pixel_attention_mask,
            spatial_shapes=spatial_shapes,
        )


class FlaxSiglip2VisionModel(FlaxSiglip2VisionPreTrainedModel):
    """SigLIP 2 image encoder. Returns hidden states and the pooled output."""

    config_class = Siglip2VisionConfig
    base_model_prefix = "vision_model"
    module_class = Vision
    module_templates = {f"vision_model.{name}": name for name in VISION_MODULES}


class FlaxSiglip2ForImageClassification(FlaxSiglip2VisionPreTrainedModel):
    """SigLIP 2 for image classification."""

    config_class = Siglip2Config
    base_model_prefix = "siglip2"
    module_class = ImageClassification


class FlaxSiglip2Model(PatchInputs, FlaxCLIPPreTrainedModel):
    """SigLIP 2, which computes the similarities of images and texts."""

    config_class = Siglip2Config  # type: ignore[assignment]  # of another family
    base_model_prefix = "siglip2"
    module_class = Siglip2

    def __call__(  # type: ignore[override]  # patches have a mask and a shape
        self,
        input_ids: Input,
        pixel_values: Input,
        pixel_attention_mask: Input,
        spatial_shapes: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model. `FlaxPreTrainedModel.run` describes the other arguments.

        `input_ids` and `attention_mask` are `(texts, length)`. `pixel_values` is `(images, patches,
        features)`, `pixel_attention_mask` is `(images, patches)`, and `spatial_shapes` is `(images,
        2)`. The number of texts may differ from the number of images.
        """
        model_inputs = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def get_image_features(  # type: ignore[override]  # patches have a mask and a shape
        self,
        pixel_values: Input,
        pixel_attention_mask: Input,
        spatial_shapes: Input,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
    ) -> Any:
        """Returns the embeddings of images, `(batch, hidden)`. They are not normalized."""
        model_inputs = {
            "pixel_values": pixel_values,
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
        }
        return self.features("get_image_features", model_inputs, params, dropout_rng, train)
