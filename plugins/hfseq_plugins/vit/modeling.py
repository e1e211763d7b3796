"""ViT (Dosovitskiy et al., 2021) on Flax NNX. Module attributes are named as in checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig, ViTConfig

from hfseq import nn
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels


def dense(
    config: PreTrainedConfig,
    features_in: int,
    features_out: int,
    rngs: nnx.Rngs,
    use_bias: bool = True,
) -> nn.Linear:
    """Returns a linear layer with the initialization of the family."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=use_bias)


class PatchEmbeddings(nnx.Module):
    """Embeddings of the patches of an image, row by row."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        size, init = nn.height_and_width(config.patch_size), nn.normal(config.initializer_range)
        self.projection = nn.Conv(
            config.num_channels, config.hidden_size, size, init, rngs, stride=size
        )

    def __call__(self, pixel_values: jax.Array) -> jax.Array:  # (batch, channels, height, width)
        """Maps `(batch, channels, height, width)` to `(batch, patches, hidden)`."""
        return nn.embed_patches(self.projection, pixel_values)


class Embeddings(nnx.Module):
    """Class token and patch embeddings, plus position embeddings."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        init = nn.normal(config.initializer_range)
        patch, image_size = map(nn.height_and_width, (config.patch_size, config.image_size))
        grid_height, grid_width = (
            side // patch_side for side, patch_side in zip(image_size, patch, strict=True)
        )
        width = config.hidden_size
        self.cls_token = nnx.Param(init(rngs.params(), (1, 1, width), jnp.float32))
        shape = (1, grid_height * grid_width + 1, width)
        self.position_embeddings = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.patch_embeddings = PatchEmbeddings(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        rngs: Keys | None,
    ) -> jax.Array:
        """Maps `(batch, channels, height, width)` to `(batch, patches + 1, hidden)`."""
        x = self.prepend_cls_token(self.patch_embeddings(pixel_values))
        return self.dropout(x + self.position_embeddings[...].astype(x.dtype), rngs)

    def prepend_cls_token(self, x: jax.Array) -> jax.Array:
        """Prepends the class token to patches, `(batch, patches, hidden)`."""
        cls_token = jnp.broadcast_to(
            self.cls_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2])
        )
        return jnp.concatenate([cls_token, x], 1)


class SelfAttention(nnx.Module):
    """Bidirectional multi-head attention."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.qkv_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key, self.value = (
            dense(config, width, width, rngs, use_bias=bias) for _ in range(3)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
        return_weights: bool,
        bias: jax.Array | None = None,  # (1, heads, patches + 1, patches + 1)
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            bias=bias,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return attn_output.reshape(x.shape), weights


class Output(nnx.Module):
    """Projection to the hidden size, and dropout."""

    def __init__(self, config: PreTrainedConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = dense(config, features_in, config.hidden_size, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.dropout(self.dense(x), rngs)


class Attention(nnx.Module):
    """Attention and its output projection."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.output = Output(config, config.hidden_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(x, rngs, return_weights)
        return self.output(attn_output, rngs), weights


class Intermediate(nnx.Module):
    """First half of the feed-forward block: projection and activation."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.intermediate_size, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.act(self.dense(x))


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.layernorm_before = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.intermediate = Intermediate(config, rngs)
        self.output = Output(config, config.intermediate_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(self.layernorm_before(x), rngs, return_weights)
        x = x + attn_output
        return x + self.output(self.intermediate(self.layernorm_after(x)), rngs), weights


class Encoder(nnx.Module):
    """The layers of the encoder."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class Pooler(nnx.Module):
    """Projection of the class token, with an activation."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.pooler_output_size, rngs)
        self.act = nn.activation(config.pooler_act)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.act(self.dense(x[:, 0]))


class ViT(nnx.Module):
    """ViT encoder without a head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.pooler = Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(pixel_values, rngs),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*layer_inputs, x) if layer_inputs is not None else None
        x = self.layernorm(x)
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=states,
            attentions=attentions if output_attentions else None,
        )


class ImageClassification(nnx.Module):
    """Image classification, from the class token."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.vit = ViT(config, rngs, add_pooling_layer=False)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.vit(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(outputs.last_hidden_state[:, 0])
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class FlaxViTPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the ViT models: configuration and checkpoint names."""

    config_class = ViTConfig
    base_model_prefix = "vit"
    # Transformers 5 renamed the modules of the PyTorch classes. The tensors in checkpoint files
    # keep the old names.
    weight_synonyms = {
        "layers.{}": "encoder.layer.{}",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    module_templates = {stored: name for name, stored in weight_synonyms.items()}


class FlaxViTModel(FlaxViTPreTrainedModel):
    """ViT without a head. Returns hidden states and the pooled class token."""

    module_class = ViT


class FlaxViTForImageClassification(FlaxViTPreTrainedModel):
    """ViT for image classification."""

    module_class = ImageClassification
