"""DINOv2 (Oquab et al., 2024) on Flax NNX: ViT with scaled branches, for pictures of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import Dinov2Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.vit import modeling as vit
from hfseq_plugins.vit.modeling import dense


class Embeddings(vit.Embeddings):
    """Those of ViT, with places for pictures of any size and a vector for hidden patches."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.patch = nn.height_and_width(config.patch_size)
        self.picture = nn.height_and_width(config.image_size)
        shape = (1, config.hidden_size)
        self.mask_token = nnx.Param(jnp.zeros(shape)) if config.use_mask_token else nnx.data(None)

    def __call__(
        self, pixel_values: jax.Array, rngs: Keys | None, bool_masked_pos: jax.Array | None = None
    ) -> jax.Array:
        x = self.patch_embeddings(pixel_values)
        if bool_masked_pos is not None:
            x = self.hidden(x, bool_masked_pos)
        x = self.prepend_cls_token(x)
        if self.position_embeddings is not None:
            x = x + self.places(self.grid(pixel_values.shape[2:])).astype(x.dtype)
        return self.dropout(x, rngs)

    def grid(self, picture: tuple[int, ...]) -> tuple[int, int]:
        """Return how many patches a picture has, downwards and across."""
        return picture[0] // self.patch[0], picture[1] // self.patch[1]

    def places(self, grid: tuple[int, int]) -> jax.Array:
        """Return the vectors of places, (1, patches + 1, width), of so many patches."""
        table = self.position_embeddings[...]
        patches = table[0, 1:].reshape(*self.grid(self.picture), -1)
        stretched = nn.resize_grid(patches, grid).reshape(1, -1, table.shape[-1])
        return jnp.concatenate([table[:, :1], stretched], 1)

    def hidden(self, x: jax.Array, hide: jax.Array) -> jax.Array:
        """Put the same vector into all patches that are hidden."""
        if self.mask_token is None:
            raise UsageError("bool_masked_pos: the configuration has use_mask_token=False")
        if hide.shape != x.shape[:2]:
            raise UsageError(f"bool_masked_pos is {hide.shape}, the patches are {x.shape[:2]}")
        return jnp.where(hide.astype(bool)[..., None], self.mask_token[...].astype(x.dtype), x)


class LayerScale(nnx.Module):
    """A factor for each number of a branch."""

    def __init__(self, config: Dinov2Config):
        self.lambda1 = nnx.Param(jnp.full(config.hidden_size, float(config.layerscale_value)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.lambda1[...].astype(x.dtype)


class MLP(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc1 = dense(config, width, int(width * config.mlp_ratio), rngs)
        self.fc2 = dense(config, int(width * config.mlp_ratio), width, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))


class SwiGLU(nnx.Module):
    """The gated feed-forward block of the largest model."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        width = config.hidden_size
        # Two thirds of the width of the other block, rounded up to a multiple of eight.
        inner = (int(int(width * config.mlp_ratio) * 2 / 3) + 7) // 8 * 8
        self.weights_in = dense(config, width, 2 * inner, rngs)
        self.weights_out = dense(config, inner, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, x = jnp.split(self.weights_in(x), 2, -1)
        return self.weights_out(jax.nn.silu(gate) * x)


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm; their results are scaled."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = vit.Attention(config, rngs)
        self.layer_scale1 = LayerScale(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = (SwiGLU if config.use_swiglu_ffn else MLP)(config, rngs)
        self.layer_scale2 = LayerScale(config)
        self.drop_path = nn.DropPath(config.drop_path_rate)

    def __call__(self, x, *, rngs, return_weights=False):
        mixed, weights = self.attention(self.norm1(x), rngs, return_weights)
        x = x + self.drop_path(self.layer_scale1(mixed), rngs)
        return x + self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))), rngs), weights


class Encoder(nnx.Module):
    """The stack of layers."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class Dinov2(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(
        self,
        pixel_values,
        bool_masked_pos=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        x, weights, inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(pixel_values, rngs, bool_masked_pos),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*inputs, x) if output_hidden_states else None
        x = self.layernorm(x)
        return out.FlaxBaseModelOutputWithPooling(
            x, x[:, 0], states, weights if output_attentions else None
        )


class ImageClassification(nnx.Module):
    """A label for the picture, from its first place and the mean of its patches."""

    def __init__(self, config: Dinov2Config, rngs: nnx.Rngs):
        self.dinov2 = Dinov2(config, rngs)
        self.classifier = dense(config, 2 * config.hidden_size, config.num_labels, rngs)

    def __call__(
        self,
        pixel_values,
        bool_masked_pos=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        encoded = self.dinov2(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        patches = encoded.last_hidden_state[:, 1:].mean(1)
        logits = self.classifier(jnp.concatenate([encoded.pooler_output, patches], -1))
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class FlaxDinov2PreTrainedModel(FlaxVisionPreTrainedModel):
    """Base of the DINOv2 classes: configuration and checkpoint names."""

    config_class = Dinov2Config
    base_model_prefix = "dinov2"
    any_image_size = True
    # The names that PyTorch's classes have in memory since Transformers 5, not in files.
    weight_synonyms = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
    }


class FlaxDinov2Model(FlaxDinov2PreTrainedModel):
    """DINOv2 without a head: hidden states, and the normed vector of the first place."""

    module_class = Dinov2


class FlaxDinov2ForImageClassification(FlaxDinov2PreTrainedModel):
    """DINOv2 with a classifier of pictures."""

    module_class = ImageClassification
