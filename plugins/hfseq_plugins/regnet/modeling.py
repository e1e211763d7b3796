"""RegNet (Radosavovic et al., 2020) on Flax NNX: ResNet with grouped convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx
from transformers import PreTrainedConfig, RegNetConfig

from hfseq import nn
from hfseq_plugins.resnet import modeling as resnet
from hfseq_plugins.resnet.modeling import INIT, ConvLayer, Function


class SqueezeExcitation(nnx.Module):
    """Squeeze-and-excitation (Hu et al., 2018): scales channels by a function of their means."""

    def __init__(self, features: int, reduced: int, rngs: nnx.Rngs):
        self.attention = nnx.List(
            [
                nn.Conv(features, reduced, (1, 1), INIT, rngs, bias_init=nn.uniform(features)),
                Function(jax.nn.relu),
                nn.Conv(reduced, features, (1, 1), INIT, rngs, bias_init=nn.uniform(reduced)),
                Function(jax.nn.sigmoid),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, channels)` to the same shape."""
        y = x.mean((1, 2), keepdims=True)
        for part in self.attention:
            y = part(y)
        return x * y


class Block(resnet.Block):
    """Residual block of type `x`, or of type `y` with squeeze-and-excitation."""

    @staticmethod
    def make_layers(
        config: PreTrainedConfig,
        features_in: int,
        features_out: int,
        rngs: nnx.Rngs,
        stride: int,
    ) -> Sequence[nnx.Module]:
        """Returns the layers of the block. The second convolution is grouped."""
        groups, act = max(1, features_out // config.groups_width), config.hidden_act
        parts: list[nnx.Module] = [
            ConvLayer(features_in, features_out, rngs, 1, act=act),
            ConvLayer(features_out, features_out, rngs, 3, stride, groups, act),
        ]
        if config.layer_type == "y":
            parts.append(SqueezeExcitation(features_out, round(features_in / 4), rngs))
        return [*parts, ConvLayer(features_out, features_out, rngs, 1)]


class Embeddings(nnx.Module):
    """First layer of the network, a convolution with stride 2."""

    def __init__(self, config: RegNetConfig, rngs: nnx.Rngs):
        self.embedder = ConvLayer(
            config.num_channels, config.embedding_size, rngs, 3, 2, act=config.hidden_act
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, channels)` to `(batch, height / 2, width / 2, features)`."""
        return self.embedder(x)


class RegNet(resnet.ResNet):
    """RegNet without a head."""

    submodule_classes = (Embeddings, Block)


class ImageClassification(resnet.ImageClassification):
    """Image classification, from the mean of the last feature map."""

    prefix, base = "regnet", RegNet


class FlaxRegNetPreTrainedModel(resnet.FlaxResNetPreTrainedModel):
    """Base class of the RegNet models. `params` has the same structure as in ResNet."""

    config_class = RegNetConfig
    base_model_prefix = "regnet"
    native_synonyms = {}


class FlaxRegNetModel(FlaxRegNetPreTrainedModel):
    """RegNet without a head. Returns the last feature map and its mean."""

    module_class = RegNet


class FlaxRegNetForImageClassification(FlaxRegNetPreTrainedModel):
    """RegNet for image classification."""

    module_class = ImageClassification
