"""DINOv2 (Oquab et al., 2024) on Flax NNX: ViT with layer scale, for images of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import Dinov2Config, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels
from hfseq_plugins.vit import modeling as vit
from hfseq_plugins.vit.modeling import dense


class Embeddings(vit.Embeddings):
    """ViT embeddings with a mask token. Position embeddings are interpolated to the image size."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.patch_size = nn.height_and_width(config.patch_size)
        self.image_size = nn.height_and_width(config.image_size)
        shape = (1, config.hidden_size)
        self.mask_token = nnx.Param(jnp.zeros(shape)) if config.use_mask_token else nnx.data(None)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        rngs: Keys | None,
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
    ) -> jax.Array:
        x = self.patch_embeddings(pixel_values)
        if bool_masked_pos is not None:
            x = self.mask_patches(x, bool_masked_pos)
        x = self.prepend_cls_token(x)
        if self.position_embeddings is not None:
            x = x + self.interpolated_positions(self.grid(pixel_values.shape[2:])).astype(x.dtype)
        return self.dropout(x, rngs)

    def grid(self, image_size: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of patches in height and width."""
        return image_size[0] // self.patch_size[0], image_size[1] // self.patch_size[1]

    def interpolated_positions(self, grid: tuple[int, int]) -> jax.Array:
        """Returns position embeddings for a grid of patches, `(1, patches + 1, hidden)`."""
        table = self.position_embeddings[...]
        patches = table[0, 1:].reshape(*self.grid(self.image_size), -1)
        resized = nn.resize_grid(patches, grid).reshape(1, -1, table.shape[-1])
        return jnp.concatenate([table[:, :1], resized], 1)

    def mask_patches(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Replaces masked patches by the mask token.

        Args:
            x: Patch embeddings, `(batch, patches, hidden)`.
            mask: Mask, `(batch, patches)`, true for masked patches.

        Raises:
            UsageError: The model has no mask token, or the mask has the wrong shape.
        """
        if self.mask_token is None:
            raise UsageError("bool_masked_pos requires use_mask_token=True in the configuration")
        if mask.shape != x.shape[:2]:
            raise UsageError(f"bool_masked_pos has shape {mask.shape}, expected {x.shape[:2]}")
        return jnp.where(mask.astype(bool)[..., None], self.mask_token[...].astype(x.dtype), x)


class LayerScale(nnx.Module):
    """Learned factor for each feature of a residual branch."""

    def __init__(self, config: PreTrainedConfig):
        self.lambda1 = nnx.Param(jnp.full(config.hidden_size, float(config.layerscale_value)))

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return x * self.lambda1[...].astype(x.dtype)


class MLP(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc1 = dense(config, width, int(width * config.mlp_ratio), rngs)
        self.fc2 = dense(config, int(width * config.mlp_ratio), width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.fc2(self.act(self.fc1(x)))


class SwiGLU(nnx.Module):
    """Gated feed-forward block of the largest model."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        width = config.hidden_size
        # Two thirds of the inner width of `MLP`, rounded up to a multiple of eight.
        inner = (int(int(width * config.mlp_ratio) * 2 / 3) + 7) // 8 * 8
        self.weights_in = dense(config, width, 2 * inner, rngs)
        self.weights_out = dense(config, inner, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        gate, x = jnp.split(self.weights_in(x), 2, -1)
        return self.weights_out(jax.nn.silu(gate) * x)


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward, with layer scale."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = vit.Attention(config, rngs)
        self.layer_scale1 = LayerScale(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = (SwiGLU if config.use_swiglu_ffn else MLP)(config, rngs)
        self.layer_scale2 = LayerScale(config)
        self.drop_path = nn.DropPath(config.drop_path_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(self.norm1(x), rngs, return_weights)
        x = x + self.drop_path(self.layer_scale1(attn_output), rngs)
        return x + self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))), rngs), weights


class Encoder(nnx.Module):
    """The layers of the encoder."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class Dinov2(nnx.Module):
    """DINOv2 encoder without a head."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(pixel_values, rngs, bool_masked_pos),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*layer_inputs, x) if layer_inputs is not None else None
        x = self.layernorm(x)
        return out.FlaxBaseModelOutputWithPooling(
            x, x[:, 0], states, attentions if output_attentions else None
        )


class ImageClassification(nnx.Module):
    """Image classification, from the class token and the mean of the patches."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.dinov2 = Dinov2(config, rngs)
        self.classifier = dense(config, 2 * config.hidden_size, num_labels(config), rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.dinov2(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        patches = outputs.last_hidden_state[:, 1:].mean(1)
        logits = self.classifier(jnp.concatenate([outputs.pooler_output, patches], -1))
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class FlaxDinov2PreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the DINOv2 models: configuration and checkpoint names."""

    config_class = Dinov2Config
    base_model_prefix = "dinov2"
    any_image_size = True
    # Transformers 5 renamed the modules of the PyTorch classes. The tensors in checkpoint files
    # keep the old names.
    weight_synonyms = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
    }
    module_templates = {stored: name for name, stored in weight_synonyms.items()}


class FlaxDinov2Model(FlaxDinov2PreTrainedModel):
    """DINOv2 without a head. Returns hidden states and the normalized class token."""

    module_class = Dinov2


class FlaxDinov2ForImageClassification(FlaxDinov2PreTrainedModel):
    """DINOv2 for image classification."""

    module_class = ImageClassification
