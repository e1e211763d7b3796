"""ResNet (He et al., 2016) on Flax NNX. Module attributes are named as in checkpoints.

The channels are the last axis inside of the network, and the second axis of inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig, ResNetConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxVisionPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels

#: Initialization of He et al. (2015), which is `kaiming_normal_` with `fan_out` in PyTorch.
INIT = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Function(nnx.Module):
    """A module without parameters, which calls a function.

    It takes the place of such a module in a `Sequential` of PyTorch, so that the other modules have
    the same indices as in checkpoints.
    """

    def __init__(self, function: Callable[[jax.Array], jax.Array]):
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, height, width, channels)
        return self.function(x)


class ConvLayer(nnx.Module):
    """Convolution with padding, batch norm and activation.

    Args:
        features_in: Number of input channels.
        features_out: Number of output channels.
        rngs: Random number generators for the initial values.
        size: Kernel size.
        stride: Stride in both dimensions.
        groups: Number of groups.
        act: Name of the activation.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        rngs: nnx.Rngs,
        size: int = 3,
        stride: int = 1,
        groups: int = 1,
        act: str = "linear",
    ):
        self.convolution = nn.Conv(
            features_in,
            features_out,
            (size, size),
            INIT,
            rngs,
            stride=stride,
            padding=size // 2,
            groups=groups,
            use_bias=False,
        )
        self.normalization, self.act = nn.BatchNorm(features_out), nn.activation(act)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, features_in)` to `(batch, height, width, features_out)`."""
        return self.act(self.normalization(self.convolution(x)))


class Block(nnx.Module):
    """Residual block. The shortcut is a projection if the number of channels or stride changes."""

    def __init__(
        self, config: Any, features_in: int, features_out: int, rngs: nnx.Rngs, stride: int = 1
    ):
        self.shortcut = nnx.data(None)
        if features_in != features_out or stride != 1:
            self.shortcut = ConvLayer(features_in, features_out, rngs, 1, stride)
        self.layer = nnx.List(self.make_layers(config, features_in, features_out, rngs, stride))
        self.act = nn.activation(config.hidden_act)

    @staticmethod
    def make_layers(
        config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs, stride: int
    ) -> Sequence[nnx.Module]:
        """Returns the layers: two 3 x 3 convolutions, or three convolutions with a bottleneck."""
        if config.layer_type == "basic":
            return [
                ConvLayer(features_in, features_out, rngs, 3, stride, act="relu"),
                ConvLayer(features_out, features_out, rngs),
            ]
        bottleneck_width, stride_first = features_out // 4, config.downsample_in_bottleneck
        return [
            ConvLayer(
                features_in, bottleneck_width, rngs, 1, stride if stride_first else 1, act="relu"
            ),
            ConvLayer(
                bottleneck_width,
                bottleneck_width,
                rngs,
                3,
                1 if stride_first else stride,
                act="relu",
            ),
            ConvLayer(bottleneck_width, features_out, rngs, 1),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, features_in)` to `(batch, height, width, features_out)`."""
        y = x
        for part in self.layer:
            y = part(y)
        return self.act(y + (x if self.shortcut is None else self.shortcut(x)))


class Stage(nnx.Module):
    """Blocks with the same number of channels. The first block may halve the resolution."""

    def __init__(
        self,
        block: type[Block],
        config: Any,
        features_in: int,
        features_out: int,
        depth: int,
        stride: int,
        rngs: nnx.Rngs,
    ):
        self.layers = nnx.List(
            block(
                config,
                features_out if number else features_in,
                features_out,
                rngs,
                1 if number else stride,
            )
            for number in range(depth)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, features_in)` to `(batch, height, width, features_out)`."""
        for layer in self.layers:
            x = layer(x)
        return x


class Encoder(nnx.Module):
    """Sequence of stages."""

    def __init__(self, block: type[Block], config: Any, rngs: nnx.Rngs):
        widths = (config.embedding_size, *config.hidden_sizes)
        first_stride = 2 if config.downsample_in_first_stage else 1
        self.stages = nnx.List(
            Stage(block, config, widths[at], widths[at + 1], depth, 2 if at else first_stride, rngs)
            for at, depth in enumerate(config.depths)
        )


class Embeddings(nnx.Module):
    """First layers of the network: a 7 x 7 convolution and max pooling, each with stride 2."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.embedder = ConvLayer(
            config.num_channels, config.embedding_size, rngs, 7, 2, act=config.hidden_act
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, height, width, channels)` to `(batch, height / 4, width / 4, features)`."""
        return nnx.max_pool(self.embedder(x), (3, 3), (2, 2), ((1, 1), (1, 1)))


class ResNet(nnx.Module):
    """ResNet without a head."""

    submodule_classes: tuple[type[Any], type[Block]] = (Embeddings, Block)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        embeddings, block = self.submodule_classes
        self.embedder = embeddings(config, rngs)
        self.encoder = Encoder(block, config, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x = self.embedder(pixel_values.transpose(0, 2, 3, 1))
        states = [x]
        for stage in self.encoder.stages:
            x = stage(x)
            states.append(x)
        return out.FlaxBaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=_channels_first(x),
            pooler_output=_channels_first(x.mean((1, 2), keepdims=True)),
            hidden_states=tuple(map(_channels_first, states)) if output_hidden_states else None,
        )


def _channels_first(x: jax.Array) -> jax.Array:
    return x.transpose(0, 3, 1, 2)


class ImageClassification(nnx.Module):
    """Image classification, from the mean of the last feature map.

    Attributes:
        prefix: Name of the network in checkpoints.
        base: Class of the network.
    """

    prefix, base = "resnet", ResNet

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        setattr(self, self.prefix, self.base(config, rngs))
        width = config.hidden_sizes[-1]
        init = nn.uniform(width)
        classifier = nn.Linear(width, num_labels(config), init, rngs, bias_init=init)
        self.classifier = nnx.List([Function(jnp.ravel), classifier])

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        *,
        rngs: Keys | None = None,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        encoded = getattr(self, self.prefix)(
            pixel_values, output_hidden_states=output_hidden_states
        )
        logits = self.classifier[1](encoded.pooler_output[:, :, 0, 0])
        return out.FlaxImageClassifierOutputWithNoAttention(logits, encoded.hidden_states)


class FlaxResNetPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the ResNet models: configuration and checkpoint names.

    As in Transformers 4, `params` is `{"params": ..., "batch_stats": ...}`. With `train=True` the
    model returns a pair: the outputs and `{"batch_stats": ...}` with the updated statistics.
    """

    config_class: ClassVar[type[PreTrainedConfig]] = ResNetConfig
    base_model_prefix = "resnet"
    params_include_collections = True
    stored_collections = {"batch_stats": ("mean", "var")}
    # In Transformers 4, blocks with two layers had other names, which did not match PyTorch's.
    native_synonyms = {"layer.layer_{}": "layer.{}"}

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        pixel_values: Input,
        params: trees.Params | None = None,
        train: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        dropout_rng: jax.Array | Keys | None = None,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model on `(batch, channels, height, width)`, see `FlaxPreTrainedModel.run`.

        Raises:
            UsageError: The channels are not the second axis of `pixel_values`.
        """
        shape, channels = jnp.shape(pixel_values), self.config.num_channels  # type: ignore[arg-type]  # any array-like object
        if len(shape) == 4 and shape[1] != channels:
            raise UsageError(
                f"pixel_values have shape {shape}, but {type(self).__name__} expects (batch, "
                f"{channels}, height, width). Move the channels to the front with "
                "pixel_values.transpose(0, 3, 1, 2)"
            )
        return self.run(
            {"pixel_values": pixel_values},
            params,
            dropout_rng,
            train,
            None,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def enable_gradient_checkpointing(self) -> None:
        """Raises NotImplementedError, as in Transformers 4."""
        raise NotImplementedError(f"{type(self).__name__} does not support gradient checkpointing")


class FlaxResNetModel(FlaxResNetPreTrainedModel):
    """ResNet without a head. Returns the last feature map and its mean."""

    module_class = ResNet


class FlaxResNetForImageClassification(FlaxResNetPreTrainedModel):
    """ResNet for image classification."""

    module_class = ImageClassification
