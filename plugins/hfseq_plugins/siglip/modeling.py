"""SigLIP (Zhai et al., 2023) on Flax NNX. Module attributes are named as in checkpoints.

The text encoder is bidirectional. Its pooled output is a projection of the hidden state of the last
token. The pooled output of the image encoder is computed by attention with one learned query.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from transformers import PreTrainedConfig, SiglipConfig, SiglipTextConfig, SiglipVisionConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.layers import Initializer, truncated_normal
from hfseq.nn.visible import Mask
from hfseq_plugins.clip import modeling as clip
from hfseq_plugins.clip.modeling import (
    FlaxCLIPPreTrainedModel,
    FlaxCLIPTextPreTrainedModel,
    unit,
)
from hfseq_plugins.clip.sharding import RULES as CLIP
from hfseq_plugins.common import num_labels

RULES = [
    (r"in_proj_weight$", "table"),
    (r"head/attention/out_proj/kernel$", "row_table"),
    (r"in_proj_bias$|patch_embedding/bias$", "vector"),
    (r"(probe|logit_bias)$", "replicated"),
    (r"text_model/head/kernel$|^head/kernel$", "table"),
    (r"head/bias$", "vector"),
    (r"classifier/kernel$", "row_table"),
    (r"classifier/bias$", "replicated"),
    *CLIP,
]


def linear(features_in: int, features_out: int, rngs: nnx.Rngs, bias_std: float = 0) -> nn.Linear:
    """Returns a linear layer with Glorot initialization."""
    init = initializers.glorot_uniform()
    bias_init = nn.normal(bias_std) if bias_std else None
    return nn.Linear(features_in, features_out, init, rngs, bias_init=bias_init)


def lecun_normal(fan_in: int) -> Initializer:
    """Returns the LeCun initializer of Transformers in PyTorch.

    It draws from a normal distribution that is truncated at -2 and 2.
    """
    return truncated_normal(fan_in**-0.5 / 0.87962566103423978)


class Attention(clip.Attention):
    """Bidirectional multi-head self-attention."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.causal = False
        if width % self.heads:
            raise UsageError(
                f"num_attention_heads={self.heads} in the configuration does not divide "
                f"hidden_size={width}"
            )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            linear(width, width, rngs) for _ in range(4)
        )


class MLP(clip.MLP):
    """Feed-forward block."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.fc1 = linear(width, inner, rngs, bias_std=1e-6)
        self.fc2 = linear(inner, width, rngs, bias_std=1e-6)
        self.act = nn.activation(config.hidden_act)


class Layer(clip.Layer):
    """Pre-norm layer: attention and feed-forward."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, rngs)


class Encoder(clip.Encoder):
    """Stack of layers."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.layers = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class TextEmbeddings(clip.TextEmbeddings):
    """Sum of token and position embeddings."""

    def __init__(self, config: SiglipTextConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        init = nn.normal(width**-0.5)
        self.token_embedding = nn.Embed(config.vocab_size, width, init, rngs)
        self.position_embedding = nn.Embed(config.max_position_embeddings, width, init, rngs)


class TextTransformer(nnx.Module):
    """Bidirectional text encoder."""

    def __init__(self, config: SiglipTextConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.embeddings = TextEmbeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.final_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.head = nn.Linear(width, config.projection_size, lecun_normal(width), rngs)  # type: ignore[arg-type]  # set in all configurations

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
        x, states, weights = self.encoder(
            self.embeddings(input_ids, position_ids),
            nn.visible(attention_mask),
            rngs,
            output_attentions,
            output_hidden_states,
        )
        x = self.final_layer_norm(x)
        return out.FlaxBaseModelOutputWithPooling(x, self.head(x[:, -1]), states, weights)


class VisionEmbeddings(nnx.Module):
    """Patch embeddings, plus position embeddings."""

    def __init__(self, config: SiglipVisionConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        patch, image_size = map(nn.height_and_width, (config.patch_size, config.image_size))
        init = lecun_normal(config.num_channels * math.prod(patch))
        self.patch_embedding = nn.Conv(config.num_channels, width, patch, init, rngs, stride=patch)
        patches = math.prod(side // step for side, step in zip(image_size, patch, strict=True))
        self.position_embedding = nn.Embed(patches, width, nn.normal(width**-0.5), rngs)

    def __call__(self, pixel_values: jax.Array) -> jax.Array:  # (batch, channels, height, width)
        """Maps `(batch, channels, height, width)` to `(batch, patches, hidden)`."""
        x = nn.embed_patches(self.patch_embedding, pixel_values)
        return x + self.position_embedding(jnp.arange(x.shape[1]))


class MultiheadAttention(nnx.Module):
    """Attention like `torch.nn.MultiheadAttention`.

    One matrix contains the projections of queries, keys and values.
    """

    def __init__(self, config: SiglipVisionConfig, rngs: nnx.Rngs):
        width, self.heads = config.hidden_size, config.num_attention_heads
        init = initializers.glorot_uniform()
        self.in_proj_weight = nnx.Param(init(rngs.params(), (3 * width, width), jnp.float32))
        self.in_proj_bias = nnx.Param(jnp.zeros(3 * width))
        self.out_proj = nn.Linear(width, width, lecun_normal(width), rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, queries, hidden)
        source: jax.Array,  # (batch, keys, hidden)
        mask: Mask,
    ) -> jax.Array:
        weights = jnp.split(self.in_proj_weight[...].astype(x.dtype), 3)
        biases = jnp.split(self.in_proj_bias[...].astype(x.dtype), 3)
        query, key, value = (
            (states @ weight.T + bias).reshape(*states.shape[:2], self.heads, -1)
            for states, weight, bias in zip((x, source, source), weights, biases, strict=True)
        )
        attn_output, _ = nn.attend(query, key, value, mask=mask)
        return self.out_proj(attn_output.reshape(x.shape))


class PoolingHead(nnx.Module):
    """Pools the patches by attention with one learned query."""

    def __init__(self, config: SiglipVisionConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        bound = (3 / width) ** 0.5
        probe = jax.random.uniform(rngs.params(), (1, 1, width), minval=-bound, maxval=bound)
        self.probe = nnx.Param(probe)
        self.attention = MultiheadAttention(config, rngs)
        self.layernorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, patches, hidden)
        mask: Mask = None,
    ) -> jax.Array:
        """Maps `(batch, patches, hidden)` to `(batch, hidden)`."""
        probe = jnp.broadcast_to(self.probe[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        pooled = self.attention(probe, x, mask)
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]


class VisionTransformer(nnx.Module):
    """Image encoder."""

    def __init__(self, config: SiglipVisionConfig, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.head = PoolingHead(config, rngs) if config.vision_use_head else nnx.data(None)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x, states, weights = self.encoder(
            self.embeddings(pixel_values), None, rngs, output_attentions, output_hidden_states
        )
        x = self.post_layernorm(x)
        pooled = None if self.head is None else self.head(x)
        return out.FlaxBaseModelOutputWithPooling(x, pooled, states, weights)


class Text(nnx.Module):
    """Text encoder. Its parameters are in the attribute `text_model`, as in checkpoints."""

    def __init__(self, config: SiglipTextConfig, rngs: nnx.Rngs):
        self.text_model = TextTransformer(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        return self.text_model(
            input_ids,
            attention_mask,
            position_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class Vision(clip.Vision):
    """Image encoder. Its parameters are in the attribute `vision_model`, as in checkpoints."""

    encoder_class = VisionTransformer


class Contrast(nnx.Module):
    """Base class of models with a text and an image encoder.

    Attributes:
        vision_class: Class of the image encoder.
    """

    vision_class: ClassVar[Any] = VisionTransformer

    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        text, vision = config.text_config, config.vision_config
        if text.projection_size != vision.hidden_size or not vision.vision_use_head:  # type: ignore[union-attr]  # set in all configurations
            raise UsageError(
                f"projection_size={text.projection_size} of the text encoder must be hidden_size="  # type: ignore[union-attr]  # set in all configurations
                f"{vision.hidden_size} of the image encoder, whose vision_use_head must be True: "  # type: ignore[union-attr]  # set in all configurations
                "the pooled outputs of both encoders are compared"
            )
        self.text_model = TextTransformer(text, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.vision_model = self.vision_class(vision, rngs)
        self.logit_scale, self.logit_bias = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.zeros(1))

    def get_text_features(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the embeddings of texts, `(batch, hidden)`."""
        return self.text_model(input_ids, attention_mask, position_ids, rngs=rngs).pooler_output

    def contrast(
        self, text_outputs: out.FlaxModelOutput, vision_outputs: out.FlaxModelOutput
    ) -> out.FlaxModelOutput:
        """Computes the logits of all pairs of a text and an image from their cosine similarity.

        Args:
            text_outputs: Output of the text encoder.
            vision_outputs: Output of the image encoder.

        Returns:
            The logits as `(images, texts)` and as `(texts, images)`, the normalized embeddings, and
            the outputs of both encoders.
        """
        image_embeds = unit(vision_outputs.pooler_output)
        text_embeds = unit(text_outputs.pooler_output)
        similarity = jnp.matmul(text_embeds, image_embeds.T, preferred_element_type=jnp.float32)
        logits = similarity * jnp.exp(self.logit_scale[...]) + self.logit_bias[...]
        logits = logits.astype(text_embeds.dtype)
        return out.FlaxCLIPOutput(
            logits.T, logits, text_embeds, image_embeds, text_outputs, vision_outputs
        )


class Siglip(Contrast):
    """Text and image encoder with a joint embedding space."""

    def get_image_features(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns the embeddings of images, `(batch, hidden)`."""
        return self.vision_model(pixel_values, rngs=rngs).pooler_output

    def __call__(
        self,
        input_ids: jax.Array,  # (texts, length)
        pixel_values: jax.Array,  # (images, channels, height, width)
        attention_mask: jax.Array | None = None,  # (texts, length)
        position_ids: jax.Array | None = None,  # (texts, length)
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


def classifier(config: SiglipConfig, rngs: nnx.Rngs) -> nn.Linear:
    """Returns the image classifier."""
    width = config.vision_config.hidden_size  # type: ignore[union-attr]  # set in all configurations
    init = nn.normal(config.initializer_factor * width**-0.5)
    return nn.Linear(width, num_labels(config), init, rngs)


class ImageClassification(nnx.Module):
    """Image classification, from the mean of all patches."""

    def __init__(self, config: SiglipConfig, rngs: nnx.Rngs):
        self.vision_model = VisionTransformer(config.vision_config, rngs)  # type: ignore[arg-type]  # set in all configurations
        self.classifier = classifier(config, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.vision_model(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(outputs.last_hidden_state.mean(1))
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


#: Patterns of tensors that checkpoints of the full model contain, but that a model with only one of
#: its encoders does not use.
TEXT_PART = r"^(siglip\.)?text_model\."
VISION_PART = r"^(siglip\.)?vision_model\."
LOGIT_PART = r"^(siglip\.)?logit_(scale|bias)$"
TEXT_MODULES = ("embeddings", "encoder", "final_layer_norm", "head")
VISION_MODULES = ("embeddings", "encoder", "post_layernorm", "head")


class FlaxSiglipTextModel(FlaxCLIPTextPreTrainedModel):
    """SigLIP text encoder. Returns hidden states and the projected last token."""

    config_class = SiglipTextConfig  # type: ignore[assignment]  # of another family
    module_class = Text
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, VISION_PART, LOGIT_PART)
    module_templates = {f"text_model.{name}": name for name in TEXT_MODULES}


class FlaxSiglipVisionModel(FlaxVisionPreTrainedModel):
    """SigLIP image encoder. Returns hidden states and the pooled output."""

    config_class = SiglipVisionConfig
    base_model_prefix = "vision_model"
    module_class = Vision
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, TEXT_PART, LOGIT_PART)
    module_templates = {f"vision_model.{name}": name for name in VISION_MODULES}


class FlaxSiglipModel(FlaxCLIPPreTrainedModel):
    """SigLIP, which computes the similarities of images and texts."""

    config_class = SiglipConfig  # type: ignore[assignment]  # of another family
    base_model_prefix = "siglip"
    module_class = Siglip


class FlaxSiglipForImageClassification(FlaxVisionPreTrainedModel):
    """SigLIP for image classification."""

    config_class = SiglipConfig
    base_model_prefix = "siglip"
    module_class = ImageClassification
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, TEXT_PART, LOGIT_PART)
