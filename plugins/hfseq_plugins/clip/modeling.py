"""CLIP (Radford et al., 2021) on Flax NNX; attribute names are the checkpoint's.

A text is pooled where it ends, a picture at its first place; both encoders have the same layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out

EncoderConfig = CLIPTextConfig | CLIPVisionConfig


def linear(config: EncoderConfig, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A Linear whose results are added up over the layers."""
    std = (2 * config.hidden_size * config.num_hidden_layers) ** -0.5
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_factor * std), rngs)


def projection(
    config: EncoderConfig | CLIPConfig, side: EncoderConfig, rngs: nnx.Rngs
) -> nn.Linear:
    """Make the map of a side's pooled output into the space of both."""
    init = nn.normal(config.initializer_factor * side.hidden_size**-0.5)
    return nn.Linear(side.hidden_size, config.projection_dim, init, rngs, use_bias=False)


class Attention(nnx.Module):
    """Attention of a sequence to itself, in texts to what comes before."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, causal: bool):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.causal = causal
        self.q_proj, self.k_proj, self.v_proj = (
            linear(config, width, width, rngs) for _ in range(3)
        )
        init = nn.normal(config.initializer_factor * width**-0.5)
        self.out_proj = nn.Linear(width, width, init, rngs)

    def __call__(self, x, mask, rngs, return_weights):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=self.causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(mixed.reshape(x.shape)), weights


class MLP(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        init = nn.normal(config.initializer_factor * (2 * width) ** -0.5)
        self.fc1 = nn.Linear(width, inner, init, rngs)
        self.fc2 = linear(config, inner, width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, causal: bool):
        self.self_attn = Attention(config, rngs, causal)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, rngs)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x, mask, *, rngs, return_weights=False):
        mixed, weights = self.self_attn(self.layer_norm1(x), mask, rngs, return_weights)
        x = x + mixed
        return x + self.mlp(self.layer_norm2(x)), weights


class Encoder(nnx.Module):
    """The stack of layers."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, causal: bool):
        layers = (Layer(config, rngs, causal) for _ in range(config.num_hidden_layers))
        self.layers = nn.Layers(layers)

    def __call__(self, x, mask, rngs, output_attentions, output_hidden_states):
        """Return the last hidden state, all of them, and the weights, where they are asked for."""
        x, weights, inputs = nn.run_layers(
            self.layers,
            x,
            mask,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*inputs, x) if output_hidden_states else None
        return x, states, weights if output_attentions else None


class TextEmbeddings(nnx.Module):
    """The vectors of tokens and of their places."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        init = nn.normal(0.02 * config.initializer_factor)
        self.token_embedding = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        places = config.max_position_embeddings
        self.position_embedding = nn.Embed(places, config.hidden_size, init, rngs)

    def __call__(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        return self.token_embedding(ids) + self.position_embedding(positions)


class TextTransformer(nnx.Module):
    """The encoder of texts, which is causal."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        self.embeddings = TextEmbeddings(config, rngs)
        self.encoder = Encoder(config, rngs, causal=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.eos = config.eos_token_id

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
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
        """Return where each text ends, the first time."""
        # Old configurations say 2, which it never was: there the end is the largest id of a row.
        return (ids if self.eos == 2 else ids == self.eos).argmax(-1)


class VisionEmbeddings(nnx.Module):
    """The vectors of patches behind one for the whole picture, and those of their places."""

    def __init__(self, config: CLIPVisionConfig, rngs: nnx.Rngs):
        factor, width = config.initializer_factor, config.hidden_size
        init = nn.normal(factor * config.initializer_range)
        patch, picture = map(nn.height_and_width, (config.patch_size, config.image_size))
        whole = nn.normal(factor * width**-0.5)
        self.class_embedding = nnx.Param(whole(rngs.params(), (width,), jnp.float32))
        self.patch_embedding = nn.Conv(
            config.num_channels, width, patch, init, rngs, stride=patch, use_bias=False
        )
        height, breadth = (whole // part for whole, part in zip(picture, patch, strict=True))
        self.position_embedding = nn.Embed(height * breadth + 1, width, init, rngs)

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        x = nn.embed_patches(self.patch_embedding, pixel_values)
        first = self.class_embedding[...].astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, x.shape[2])), x], 1)
        return x + self.position_embedding(jnp.arange(x.shape[1]))


class VisionTransformer(nnx.Module):
    """The encoder of pictures; its last hidden state has not been through the last norm."""

    def __init__(self, config: CLIPVisionConfig, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(config, rngs)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = Encoder(config, rngs, causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self, pixel_values, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        x = self.pre_layrnorm(self.embeddings(pixel_values))
        x, states, weights = self.encoder(x, None, rngs, output_attentions, output_hidden_states)
        pooled = self.post_layernorm(x[:, 0])
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, weights)


class Text(nnx.Module):
    """The encoder of texts under its checkpoint name."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        self.text_model = TextTransformer(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        return self.text_model(*args, **kwargs)


class TextWithProjection(Text):
    """The same, and the projection of its pooled output."""

    def __init__(self, config: CLIPTextConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.text_projection = projection(config, config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.text_model(*args, **kwargs)
        return out.FlaxCLIPTextModelOutput(
            self.text_projection(encoded.pooler_output),
            encoded.last_hidden_state,
            encoded.hidden_states,
            encoded.attentions,
        )


class Vision(nnx.Module):
    """The encoder of pictures under its checkpoint name."""

    def __init__(self, config: CLIPVisionConfig, rngs: nnx.Rngs):
        self.vision_model = VisionTransformer(config, rngs)

    def __call__(
        self, pixel_values, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        return self.vision_model(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class CLIP(nnx.Module):
    """Both encoders, their projections into one space, and how well they agree there."""

    def __init__(self, config: CLIPConfig, rngs: nnx.Rngs):
        text, vision = config.text_config, config.vision_config
        self.text_model = TextTransformer(text, rngs)
        self.vision_model = VisionTransformer(vision, rngs)
        self.text_projection = projection(config, text, rngs)
        self.visual_projection = projection(config, vision, rngs)
        self.logit_scale = nnx.Param(jnp.asarray(config.logit_scale_init_value, jnp.float32))

    def get_text_features(
        self, input_ids, attention_mask=None, position_ids=None, *, rngs: Keys | None = None
    ):
        """Return the projections of texts: (batch, projection_dim)."""
        encoded = self.text_model(input_ids, attention_mask, position_ids, rngs=rngs)
        return self.text_projection(encoded.pooler_output)

    def get_image_features(self, pixel_values, *, rngs: Keys | None = None):
        """Return the projections of pictures: (batch, projection_dim)."""
        return self.visual_projection(self.vision_model(pixel_values, rngs=rngs).pooler_output)

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        asked = {"output_attentions": output_attentions}
        asked["output_hidden_states"] = output_hidden_states
        pictures = self.vision_model(pixel_values, rngs=rngs, **asked)
        texts = self.text_model(input_ids, attention_mask, position_ids, rngs=rngs, **asked)
        return self.contrast(texts, pictures)

    def contrast(self, texts: out.FlaxModelOutput, pictures: out.FlaxModelOutput):
        """Return how well what both encoders returned fits together."""
        image_embeds = _unit(self.visual_projection(pictures.pooler_output))
        text_embeds = _unit(self.text_projection(texts.pooler_output))
        alike = jnp.matmul(text_embeds, image_embeds.T, preferred_element_type=jnp.float32)
        logits = (alike * jnp.exp(self.logit_scale[...])).astype(text_embeds.dtype)
        return out.FlaxCLIPOutput(logits.T, logits, text_embeds, image_embeds, texts, pictures)


def _unit(x: jax.Array) -> jax.Array:
    """Divide vectors by their length."""
    y = x.astype(jnp.float32)
    return (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).astype(x.dtype)


class FlaxCLIPTextPreTrainedModel(FlaxPreTrainedModel):
    """Base of the encoders of texts: configuration, checkpoint names, the call of Transformers 4.

    A checkpoint of the whole CLIP serves too; files have the prefix ``text_model`` or lack it.
    """

    config_class = CLIPTextConfig
    base_model_prefix = "text_model"
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"^(vision_model|visual_projection)\.")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` and the mask are (batch, length). ``segment_ids`` (batch, length) numbers the
        documents of packed rows, 0 being padding.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
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
            extra=extra,
        )


class FlaxCLIPTextModel(FlaxCLIPTextPreTrainedModel):
    """CLIP's encoder of texts: hidden states and the vector of the end."""

    module_class = Text
    ignored_weights = (
        *FlaxCLIPTextPreTrainedModel.ignored_weights,
        r"^(text_projection\.|logit_scale$)",
    )


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextPreTrainedModel):
    """CLIP's encoder of texts with its projection into the space of pictures and texts."""

    module_class = TextWithProjection
    ignored_weights = (*FlaxCLIPTextPreTrainedModel.ignored_weights, r"^logit_scale$")


class FlaxCLIPVisionPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base of the encoders of pictures: configuration and checkpoint names."""

    config_class = CLIPVisionConfig
    base_model_prefix = "vision_model"
    ignored_weights = (
        *FlaxPreTrainedModel.ignored_weights,
        r"^(text_model|text_projection|visual_projection)\.|^logit_scale$",
    )


class FlaxCLIPVisionModel(FlaxCLIPVisionPreTrainedModel):
    """CLIP's encoder of pictures: hidden states and the normed vector of the first place."""

    module_class = Vision


class FlaxCLIPPreTrainedModel(FlaxPreTrainedModel):
    """Base of the whole CLIP: configuration, checkpoint names, the call of Transformers 4."""

    config_class = CLIPConfig
    base_model_prefix = "clip"
    module_methods = ("__call__", "get_text_features", "get_image_features")

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
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

        ``input_ids`` and the mask are (texts, length), ``pixel_values`` (pictures, channels,
        height, width): as many of the one as of the other, or not.
        """
        given = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
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
        params=None,
        dropout_rng=None,
        train=False,
    ):
        """Return the projections of texts (batch, projection_dim), not normalised."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        return self._features("get_text_features", given, params, dropout_rng, train)

    def get_image_features(self, pixel_values, params=None, dropout_rng=None, train=False):
        """Return the projections of pictures (batch, projection_dim), not normalised."""
        given = {"pixel_values": pixel_values}
        return self._features("get_image_features", given, params, dropout_rng, train)

    def _features(self, method, given, params, dropout_rng, train):
        return self.run(given, params, dropout_rng, train, False, False, True, method=method)


class FlaxCLIPModel(FlaxCLIPPreTrainedModel):
    """CLIP: how well pictures and texts fit each other."""

    module_class = CLIP
