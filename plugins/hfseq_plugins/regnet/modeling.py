"""RegNet (Radosavovic et al., 2020) on Flax NNX: ResNet with grouped convolutions in its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx
from transformers import RegNetConfig

from hfseq import nn
from hfseq_plugins.resnet import modeling as resnet
from hfseq_plugins.resnet.modeling import INIT, ConvLayer, Function


class SqueezeExcitation(nnx.Module):
    """Channels are scaled by what their means say of one another (Hu et al., 2018)."""

    def __init__(self, features: int, narrow: int, rngs: nnx.Rngs):
        self.attention = nnx.List(
            [
                nn.Conv(features, narrow, (1, 1), INIT, rngs),
                Function(jax.nn.relu),
                nn.Conv(narrow, features, (1, 1), INIT, rngs),
                Function(jax.nn.sigmoid),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.mean((1, 2), keepdims=True)
        for part in self.attention:
            y = part(y)
        return x * y


class Block(resnet.Block):
    """A residual block of type "x", or "y" with squeeze and excitation."""

    @staticmethod
    def parts(
        config: RegNetConfig, features_in: int, features_out: int, rngs: nnx.Rngs, stride: int
    ) -> Sequence[nnx.Module]:
        """Return the layers, of which the middle one is grouped."""
        groups, act = max(1, features_out // config.groups_width), config.hidden_act
        parts: list[nnx.Module] = [
            ConvLayer(features_in, features_out, rngs, 1, act=act),
            ConvLayer(features_out, features_out, rngs, 3, stride, groups, act),
        ]
        if config.layer_type == "y":
            parts.append(SqueezeExcitation(features_out, round(features_in / 4), rngs))
        return [*parts, ConvLayer(features_out, features_out, rngs, 1)]


class Embeddings(nnx.Module):
    """A convolution of every second place."""

    def __init__(self, config: RegNetConfig, rngs: nnx.Rngs):
        self.embedder = ConvLayer(
            config.num_channels, config.embedding_size, rngs, 3, 2, act=config.hidden_act
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embedder(x)


class RegNet(resnet.ResNet):
    """The network without a head."""

    submodule_classes = (Embeddings, Block)


class ImageClassification(resnet.ImageClassification):
    """A label for the picture, from the mean of its places."""

    prefix, base = "regnet", RegNet


class FlaxRegNetPreTrainedModel(resnet.FlaxResNetPreTrainedModel):
    """Base of the RegNet classes: configuration and checkpoint names; ``params`` is ResNet's."""

    config_class = RegNetConfig
    base_model_prefix = "regnet"
    native_synonyms = {}


class FlaxRegNetModel(FlaxRegNetPreTrainedModel):
    """RegNet without a head: the map of the last stage and its mean."""

    module_class = RegNet


class FlaxRegNetForImageClassification(FlaxRegNetPreTrainedModel):
    """RegNet with a classifier of pictures."""

    module_class = ImageClassification
