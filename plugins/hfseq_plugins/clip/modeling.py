"""CLIP (Radford et al., 2021) on Flax NNX. Module attributes are named as in checkpoints.

The pooled output of the text encoder is the hidden state of the end-of-text token. The pooled
output of the image encoder is the hidden state of the class token. Both encoders use the same layer
class.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, PreTrainedConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Returns a linear layer whose initial weights are smaller in models with more layers."""
    std = (2 * config.hidden_size * config.num_hidden_layers) ** -0.5
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_factor * std), rngs)


def projection(config: PreTrainedConfig, side: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Linear:
    """Returns the projection of the pooled output of an encoder to the joint embedding space."""
    init = nn.normal(config.initializer_factor * side.hidden_size**-0.5)
    return nn.Linear(side.hidden_size, config.projection_dim, init, rngs, use_bias=False)


class Attention(nnx.Module):
    """Multi-head self-attention. It is causal in the text encoder."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, causal: bool):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.causal = causal
        self.q_proj, self.k_proj, self.v_proj = (
            linear(config, width, width, rngs) for _ in range(3)
        )
        init = nn.normal(config.initializer_factor * width**-0.5)
        self.out_proj = nn.Linear(width, width, init, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=self.causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(attn_output.reshape(x.shape)), weights


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        init = nn.normal(config.initializer_factor * (2 * width) ** -0.5)
        self.fc1 = nn.Linear(width, inner, init, rngs)
        self.fc2 = linear(config, inner, width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.fc2(self.act(self.fc1(x)))


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, causal: bool):
        self.self_attn = Attention(config, rngs, causal)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, rngs)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.self_attn(self.layer_norm1(x), mask, rngs, return_weights)
        x = x + attn_output
        return x + self.mlp(self.layer_norm2(x)), weights


class Encoder(nnx.Module):
    """The layers of the encoder."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, causal: bool):
        layers = (Layer(config, rngs, causal) for _ in range(config.num_hidden_layers))
        self.layers = nn.Layers(layers)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None, Any]:
        """Runs the layers.

        Returns:
            The last hidden state, `(batch, length, hidden)`, all hidden states or `None`, and the
            attention weights or `None`.
        """
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            x,
            mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*layer_inputs, x) if layer_inputs is not None else None
        return x, states, attentions if output_attentions else None


class TextEmbeddings(nnx.Module):
    """Sum of token and position embeddings."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        init = nn.normal(0.02 * config.initializer_factor)  # type: ignore[operator]  # set in all configurations
        self.token_embedding = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        num_positions = config.max_position_embeddings
        self.position_embedding = nn.Embed(num_positions, config.hidden_size, init, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
    ) -> jax.Array:
        return self.token_embedding(input_ids) + self.position_embedding(position_ids)


class TextTransformer(nnx.Module):
    """Causal text encoder."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        self.embeddings = TextEmbeddings(config, rngs)
        self.encoder = Encoder(config, rngs, causal=nn.is_causal(config))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)  # type: ignore[arg-type]  # set in all configurations
        self.eos = config.eos_token_id

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
            position_ids = nn.positions_in_segments(documents)
        x, states, weights = self.encoder(
            self.embeddings(input_ids, position_ids),
            nn.visible(attention_mask, segment_ids),
            rngs,
            output_attentions,
            output_hidden_states,
        )
        x = self.final_layer_norm(x)
        pooled = jnp.take_along_axis(x, self.ends(input_ids)[:, None, None], 1)[:, 0]
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, weights)

    def ends(self, ids: jax.Array) -> jax.Array:
        """Returns the index of the first end-of-text token, `(batch,)`."""
        # Older configurations contain a wrong eos_token_id, 2. The end-of-text token is then the
        # token with the largest ID.
        return (ids if self.eos == 2 else ids == self.eos).argmax(-1)  # type: ignore[union-attr]  # an array


class VisionEmbeddings(nnx.Module):
    """Class token and patch embeddings, plus position embeddings."""

    def __init__(self, config: CLIPVisionConfig, rngs: nnx.Rngs):
        factor, width = config.initializer_factor, config.hidden_size
        init = nn.normal(factor * config.initializer_range)
        patch, image_size = map(nn.height_and_width, (config.patch_size, config.image_size))  # type: ignore[arg-type]  # set in all configurations
        class_init = nn.normal(factor * width**-0.5)
        self.class_embedding = nnx.Param(class_init(rngs.params(), (width,), jnp.float32))
        self.patch_embedding = nn.Conv(
            config.num_channels, width, patch, init, rngs, stride=patch, use_bias=False
        )
        grid_height, grid_width = (
            side // patch_side for side, patch_side in zip(image_size, patch, strict=True)
        )
        self.position_embedding = nn.Embed(grid_height * grid_width + 1, width, init, rngs)

    def __call__(self, pixel_values: jax.Array) -> jax.Array:  # (batch, channels, height, width)
        """Maps `(batch, channels, height, width)` to `(batch, patches + 1, hidden)`."""
        x = nn.embed_patches(self.patch_embedding, pixel_values)
        cls_token = self.class_embedding[...].astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(cls_token, (x.shape[0], 1, x.shape[2])), x], 1)
        return x + self.position_embedding(jnp.arange(x.shape[1]))


class VisionTransformer(nnx.Module):
    """Image encoder. Only the pooled output is normalized, not the last hidden state."""

    def __init__(self, config: CLIPVisionConfig, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(config, rngs)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = Encoder(config, rngs, causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x = self.pre_layrnorm(self.embeddings(pixel_values))
        x, states, weights = self.encoder(x, None, rngs, output_attentions, output_hidden_states)
        pooled = self.post_layernorm(x[:, 0])
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, weights)


class Text(nnx.Module):
    """Contains the text encoder as the attribute `text_model`, as in checkpoints."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        self.text_model = TextTransformer(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the text encoder."""
        return self.text_model(*args, **kwargs)


class TextWithProjection(Text):
    """Text encoder with a projection of its pooled output."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.text_projection = projection(config, config, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the text encoder.

        Returns text embeddings, `(batch, projection_dim)`.
        """
        outputs = self.text_model(*args, **kwargs)
        return out.FlaxCLIPTextModelOutput(
            self.text_projection(outputs.pooler_output),
            outputs.last_hidden_state,
            outputs.hidden_states,
            outputs.attentions,
        )


class Vision(nnx.Module):
    """Contains the image encoder as the attribute `vision_model`, as in checkpoints.

    Attributes:
        encoder_class: Class of the image encoder.
    """

    encoder_class: ClassVar[Any] = VisionTransformer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.vision_model = self.encoder_class(config, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        return self.vision_model(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class CLIP(nnx.Module):
    """Text and image encoder with projections to a joint embedding space."""

    def __init__(self, config: CLIPConfig, rngs: nnx.Rngs):
        text, vision = config.text_config, config.vision_config
        self.text_model = TextTransformer(text, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.vision_model = VisionTransformer(vision, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.text_projection = projection(config, text, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.visual_projection = projection(config, vision, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.logit_scale = nnx.Param(jnp.asarray(config.logit_scale_init_value, jnp.float32))

    def get_text_features(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the projected embeddings of texts, `(batch, projection_dim)`."""
        outputs = self.text_model(input_ids, attention_mask, position_ids, rngs=rngs)
        return self.text_projection(outputs.pooler_output)

    def get_image_features(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the projected embeddings of images, `(batch, projection_dim)`."""
        return self.visual_projection(self.vision_model(pixel_values, rngs=rngs).pooler_output)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        pixel_values: jax.Array,  # (batch, channels, height, width)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        flags: dict[str, Any] = {"output_attentions": output_attentions}
        flags["output_hidden_states"] = output_hidden_states
        vision_outputs = self.vision_model(pixel_values, rngs=rngs, **flags)
        text_outputs = self.text_model(input_ids, attention_mask, position_ids, rngs=rngs, **flags)
        return self.contrast(text_outputs, vision_outputs)

    def contrast(
        self, text_outputs: out.FlaxModelOutput, vision_outputs: out.FlaxModelOutput
    ) -> out.FlaxModelOutput:
        """Returns scaled cosine similarities of all texts and images.

        Args:
            text_outputs: Output of the text encoder.
            vision_outputs: Output of the image encoder.

        Returns:
            The logits, `(images, texts)` and `(texts, images)`, the normalized embeddings, and the
            outputs of both encoders.
        """
        image_embeds = unit(self.visual_projection(vision_outputs.pooler_output))
        text_embeds = unit(self.text_projection(text_outputs.pooler_output))
        similarity = jnp.matmul(text_embeds, image_embeds.T, preferred_element_type=jnp.float32)
        logits = (similarity * jnp.exp(self.logit_scale[...])).astype(text_embeds.dtype)
        return out.FlaxCLIPOutput(
            logits.T, logits, text_embeds, image_embeds, text_outputs, vision_outputs
        )


def unit(x: jax.Array) -> jax.Array:
    """Normalizes vectors to unit length."""
    y = x.astype(jnp.float32)
    return (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).astype(x.dtype)


class FlaxCLIPTextPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the CLIP text encoders: configuration, checkpoint names and call signature.

    The text encoders also load checkpoints of the full CLIP model. The names of tensors in a
    checkpoint may start with the prefix `text_model`.
    """

    config_class = CLIPTextConfig
    base_model_prefix = "text_model"
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"^(vision_model|visual_projection)\.")

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
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
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `input_ids` and `attention_mask` are `(batch, length)`. For packed rows, `segment_ids`,
        `(batch, length)`, is the document number of each token, and 0 for padding.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
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
            extra=extra,
        )


class FlaxCLIPTextModel(FlaxCLIPTextPreTrainedModel):
    """CLIP text encoder. Returns hidden states and the hidden state of the end-of-text token."""

    module_class = Text
    ignored_weights = (
        *FlaxCLIPTextPreTrainedModel.ignored_weights,
        r"^(text_projection\.|logit_scale$)",
    )
    module_templates = {
        f"text_model.{name}": name for name in ("embeddings", "encoder", "final_layer_norm")
    }


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextPreTrainedModel):
    """CLIP text encoder with the projection to the joint space of images and texts."""

    module_class = TextWithProjection
    ignored_weights = (*FlaxCLIPTextPreTrainedModel.ignored_weights, r"^logit_scale$")


class FlaxCLIPVisionPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the CLIP image encoder: configuration and checkpoint names."""

    config_class = CLIPVisionConfig
    base_model_prefix = "vision_model"
    ignored_weights = (
        *FlaxPreTrainedModel.ignored_weights,
        r"^(text_model|text_projection|visual_projection)\.|^logit_scale$",
    )


class FlaxCLIPVisionModel(FlaxCLIPVisionPreTrainedModel):
    """CLIP image encoder. Returns hidden states and the normalized class token."""

    module_class = Vision
    module_templates = {
        f"vision_model.{name}": name
        for name in ("embeddings", "pre_layrnorm", "encoder", "post_layernorm")
    }


class FlaxCLIPPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the full CLIP model: configuration, checkpoint names and call signature."""

    config_class = CLIPConfig
    base_model_prefix = "clip"
    module_methods = ("__call__", "get_text_features", "get_image_features")

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        pixel_values: Input,
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
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `input_ids` and `attention_mask` are `(texts, length)`, and `pixel_values` is `(images,
        channels, height, width)`. The numbers of texts and images may differ.
        """
        model_inputs = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
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

    def get_text_features(
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
    ) -> Any:
        """Returns the projected embeddings of texts, `(batch, projection_dim)`, not normalized."""
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        return self.features("get_text_features", model_inputs, params, dropout_rng, train)

    def get_image_features(
        self,
        pixel_values: Input,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
    ) -> Any:
        """Returns the projected embeddings of images, `(batch, projection_dim)`, not normalized."""
        model_inputs = {"pixel_values": pixel_values}
        return self.features("get_image_features", model_inputs, params, dropout_rng, train)

    def features(
        self,
        method: str,
        model_inputs: dict[str, Any],
        params: trees.Params | None,
        dropout_rng: jax.Array | Keys | None,
        train: bool,
    ) -> Any:
        """Calls a method of the module that returns embeddings."""
        return self.run(model_inputs, params, dropout_rng, train, False, False, True, method=method)


class FlaxCLIPModel(FlaxCLIPPreTrainedModel):
    """CLIP, which computes the similarities of images and texts."""

    module_class = CLIP
