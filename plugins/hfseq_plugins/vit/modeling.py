"""ViT (Dosovitskiy et al., 2021) on Flax NNX; attribute names are the checkpoint's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ViTConfig

from hfseq import nn
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out


def dense(
    config: ViTConfig, features_in: int, features_out: int, rngs: nnx.Rngs, use_bias: bool = True
) -> nn.Linear:
    """A Linear with the family's initialisation."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=use_bias)


class PatchEmbeddings(nnx.Module):
    """A vector for each patch of a picture, row by row."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        size, init = nn.height_and_width(config.patch_size), nn.normal(config.initializer_range)
        self.projection = nn.Conv(
            config.num_channels, config.hidden_size, size, init, rngs, stride=size
        )

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        return nn.embed_patches(self.projection, pixel_values)


class Embeddings(nnx.Module):
    """The vectors of patches behind one for the whole picture, and those of their places."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        init = jax.nn.initializers.truncated_normal(config.initializer_range)
        patch, picture = map(nn.height_and_width, (config.patch_size, config.image_size))
        height, breadth = (whole // part for whole, part in zip(picture, patch, strict=True))
        width = config.hidden_size
        self.cls_token = nnx.Param(init(rngs.params(), (1, 1, width), jnp.float32))
        places = (1, height * breadth + 1, width)
        self.position_embeddings = nnx.Param(init(rngs.params(), places, jnp.float32))
        self.patch_embeddings = PatchEmbeddings(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, pixel_values: jax.Array, rngs: Keys | None) -> jax.Array:
        x = self.prepend_cls_token(self.patch_embeddings(pixel_values))
        return self.dropout(x + self.position_embeddings[...].astype(x.dtype), rngs)

    def prepend_cls_token(self, x: jax.Array) -> jax.Array:
        """Put patches (batch, patches, width) behind the vector for the whole picture."""
        first = jnp.broadcast_to(self.cls_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return jnp.concatenate([first, x], 1)


class SelfAttention(nnx.Module):
    """Attention of the places of a picture to each other."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.qkv_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key, self.value = (
            dense(config, width, width, rngs, use_bias=bias) for _ in range(3)
        )

    def __call__(self, x, rngs, return_weights, bias=None):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        mixed, weights = nn.attend(
            query,
            key,
            value,
            bias=bias,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return mixed.reshape(x.shape), weights


class Output(nnx.Module):
    """Projection back to the residual stream, and dropout."""

    def __init__(self, config: ViTConfig, features_in: int, rngs: nnx.Rngs):
        self.dense = dense(config, features_in, config.hidden_size, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        return self.dropout(self.dense(x), rngs)


class Attention(nnx.Module):
    """Attention and its output projection."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.output = Output(config, config.hidden_size, rngs)

    def __call__(self, x, rngs, return_weights):
        mixed, weights = self.attention(x, rngs, return_weights)
        return self.output(mixed, rngs), weights


class Intermediate(nnx.Module):
    """The wide half of the feed-forward block."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.intermediate_size, rngs)
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.dense(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.layernorm_before = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.intermediate = Intermediate(config, rngs)
        self.output = Output(config, config.intermediate_size, rngs)

    def __call__(self, x, *, rngs, return_weights=False):
        mixed, weights = self.attention(self.layernorm_before(x), rngs, return_weights)
        x = x + mixed
        return x + self.output(self.intermediate(self.layernorm_after(x)), rngs), weights


class Encoder(nnx.Module):
    """The stack of layers."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class Pooler(nnx.Module):
    """The first place through a layer with its own activation."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.pooler_output_size, rngs)
        self.act = nn.activation(config.pooler_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.dense(x[:, 0]))


class ViT(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.pooler = Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def __call__(
        self, pixel_values, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        x, weights, inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(pixel_values, rngs),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        states = (*inputs, x) if output_hidden_states else None
        x = self.layernorm(x)
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=states,
            attentions=weights if output_attentions else None,
        )


class ImageClassification(nnx.Module):
    """A label for the picture, from its first place."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.vit = ViT(config, rngs, add_pooling_layer=False)
        self.classifier = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(
        self, pixel_values, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        encoded = self.vit(
            pixel_values,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(encoded.last_hidden_state[:, 0])
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class FlaxViTPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base of the ViT classes: configuration and checkpoint names."""

    config_class = ViTConfig
    base_model_prefix = "vit"
    # The names that PyTorch's classes have in memory since Transformers 5, not in files.
    weight_synonyms = {
        "layers.{}": "encoder.layer.{}",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }


class FlaxViTModel(FlaxViTPreTrainedModel):
    """ViT without a head: hidden states and the pooled first place."""

    module_class = ViT


class FlaxViTForImageClassification(FlaxViTPreTrainedModel):
    """ViT with a classifier of pictures."""

    module_class = ImageClassification
