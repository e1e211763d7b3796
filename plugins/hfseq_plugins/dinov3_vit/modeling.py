"""DINOv3 (Siméoni et al., 2025) on Flax NNX: ViT with rotary positions, for images of any size.

Module attributes are named as in checkpoints.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import DINOv3ViTConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.layers import truncated_normal
from hfseq.nn.positions import Angles
from hfseq_plugins.dinov2.modeling import LayerScale

RULES = [
    (r"(q|k|v|gate|up)_proj/kernel$", "column"),
    (r"(q|k|v|gate|up)_proj/bias$", "column_bias"),
    (r"(o|down)_proj/kernel$", "row"),
    (r"(o|down)_proj/bias$", "vector"),
    (r"patch_embeddings/kernel$", "channels"),
    (r"patch_embeddings/bias$", "vector"),
    (r"norm\d?/(scale|bias)$|lambda1$", "vector"),
    (r"(cls_token|mask_token|register_tokens)$", "replicated"),
]


def linear(
    config: DINOv3ViTConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """Returns a linear layer whose initial weights have the configured standard deviation."""
    init = truncated_normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=bias)


class Embeddings(nnx.Module):
    """Embeddings of the class token, register tokens (Darcet et al., 2024) and patches."""

    def __init__(self, config: DINOv3ViTConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, truncated_normal(config.initializer_range)
        size = nn.height_and_width(config.patch_size)
        self.cls_token = nnx.Param(init(rngs.params(), (1, 1, width), jnp.float32))
        self.mask_token = nnx.Param(jnp.zeros((1, 1, width)))
        shape = (1, config.num_register_tokens, width)
        self.register_tokens = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.patch_embeddings = nn.Conv(config.num_channels, width, size, init, rngs, stride=size)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
    ) -> jax.Array:
        """Maps `(batch, channels, height, width)` to `(batch, 1 + registers + patches, hidden)`."""
        x = nn.embed_patches(self.patch_embeddings, pixel_values)
        if bool_masked_pos is not None:
            if bool_masked_pos.shape != x.shape[:2]:
                raise UsageError(
                    f"bool_masked_pos has shape {bool_masked_pos.shape}, expected {x.shape[:2]}, "
                    "the number of images and of patches per image"
                )
            mask_token = self.mask_token[...].astype(x.dtype)
            x = jnp.where(bool_masked_pos.astype(bool)[..., None], mask_token, x)
        prefix = jnp.concatenate([self.cls_token[...], self.register_tokens[...]], 1)
        prefix = jnp.broadcast_to(prefix.astype(x.dtype), (len(x), *prefix.shape[1:]))
        return jnp.concatenate([prefix, x], 1)


class RotaryPositions:
    """Rotary embeddings of the patches.

    Half of the features are rotated by angles that depend on the row of a patch, and half by angles
    that depend on its column. Coordinates are between -1 and 1 for images of any size. In training,
    they are randomly shifted and scaled, in the same way for all images of a batch.
    """

    def __init__(self, config: DINOv3ViTConfig):
        head_dim = config.hidden_size // config.num_attention_heads
        if head_dim % 4:
            raise UsageError(
                f"hidden_size={config.hidden_size} and num_attention_heads="
                f"{config.num_attention_heads} in the configuration give {head_dim} features per "
                "head, which must be a multiple of 4 for the rotary positions of images"
            )
        exponents = np.arange(head_dim // 4, dtype=np.float32) * np.float32(4 / head_dim)
        self.frequencies = (1 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
        self.patch_size = nn.height_and_width(config.patch_size)
        self.prefix = 1 + config.num_register_tokens
        self.shift, self.jitter = config.pos_embed_shift, config.pos_embed_jitter
        self.rescale = config.pos_embed_rescale

    def __call__(self, image_size: tuple[int, ...], rngs: Keys | None) -> Angles:
        """Returns cosines and sines, float32 `(1, 1 + registers + patches, 1, head_dim / 2)`.

        The class token and the registers are not rotated.

        Args:
            image_size: Height and width of the images.
            rngs: PRNG keys, or `None` in evaluation.
        """
        grid = [side // patch for side, patch in zip(image_size, self.patch_size, strict=True)]
        rows, columns = (
            (2 * ((np.arange(count) + 0.5) / count) - 1).astype(np.float32) for count in grid
        )
        coordinates = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2)
        if rngs is not None:
            coordinates = self.augment(coordinates, rngs.child().shared)
        angles = 2 * math.pi * coordinates[:, :, None] * self.frequencies
        angles = jnp.pad(angles.reshape(len(coordinates), -1), ((self.prefix, 0), (0, 0)))
        angles = angles[None, :, None]
        return jnp.cos(angles), jnp.sin(angles)

    def augment(self, coordinates: jax.Array, rngs: Keys) -> jax.Array:
        """Shifts and scales coordinates, `(patches, 2)`, at random."""

        def uniform(shape: tuple[int, ...], bound: float) -> jax.Array:
            return (2 * (rngs.bits(shape).astype(jnp.float32) + 0.5) / 65536 - 1) * bound

        if self.shift is not None:
            coordinates = coordinates + uniform((1, 2), self.shift)
        if self.jitter is not None:
            coordinates = coordinates * jnp.exp(uniform((1, 2), math.log(self.jitter)))
        if self.rescale is not None:
            coordinates = coordinates * jnp.exp(uniform((1, 1), math.log(self.rescale)))
        return coordinates


class Attention(nnx.Module):
    """Bidirectional attention with rotary embeddings."""

    def __init__(self, config: DINOv3ViTConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.q_proj = linear(config, width, width, rngs, config.query_bias)
        self.k_proj = linear(config, width, width, rngs, config.key_bias)
        self.v_proj = linear(config, width, width, rngs, config.value_bias)
        self.o_proj = linear(config, width, width, rngs, config.proj_bias)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        attn_output, weights = nn.attend(
            nn.rotate(query, rotary_emb),
            nn.rotate(key, rotary_emb),
            value,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.o_proj(attn_output.reshape(x.shape)), weights


class MLP(nnx.Module):
    """Feed-forward block, with a gate in the largest models (`config.use_gated_mlp`)."""

    def __init__(self, config: DINOv3ViTConfig, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = (
            linear(config, width, inner, rngs, bias) if config.use_gated_mlp else nnx.data(None)
        )
        self.up_proj = linear(config, width, inner, rngs, bias)
        self.down_proj = linear(config, inner, width, rngs, bias)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward, with layer scale."""

    def __init__(self, config: DINOv3ViTConfig, rngs: nnx.Rngs):
        self.norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.layer_scale1 = LayerScale(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, rngs)
        self.layer_scale2 = LayerScale(config)
        self.drop_path = nn.DropPath(config.drop_path_rate)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(self.norm1(x), rotary_emb, rngs, return_weights)
        x = x + self.drop_path(self.layer_scale1(attn_output), rngs)
        return x + self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))), rngs), weights


class DINOv3ViT(nnx.Module):
    """DINOv3 encoder without a head."""

    def __init__(self, config: DINOv3ViTConfig, rngs: nnx.Rngs):
        self.rotary = RotaryPositions(config)
        self.embeddings = Embeddings(config, rngs)
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

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
            self.layer,
            self.embeddings(pixel_values, bool_masked_pos),
            self.rotary(pixel_values.shape[2:], rngs),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*layer_inputs, x) if layer_inputs is not None else None
        x = self.norm(x)
        return out.FlaxBaseModelOutputWithPooling(
            x, x[:, 0], states, attentions if output_attentions else None
        )


class FlaxDINOv3ViTPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the DINOv3 models: configuration and checkpoint names."""

    config_class = DINOv3ViTConfig
    any_image_size = True
    # The layers of PyTorch's class are in a submodule `model`, whose name the checkpoints omit.
    weight_synonyms = {"model.layer.{}": "layer.{}"}
    module_templates = {"layer.{}": "model.layer.{}"}


class FlaxDINOv3ViTModel(FlaxDINOv3ViTPreTrainedModel):
    """DINOv3 without a head. Returns hidden states and the normalized class token."""

    module_class = DINOv3ViT
