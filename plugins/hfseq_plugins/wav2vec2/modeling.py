"""wav2vec 2.0 (Baevski et al., 2020) on Flax NNX. Module attributes are named as in checkpoints.

Convolutions map audio samples to a shorter sequence of feature vectors, the *frames*, which a
Transformer encodes. Both variants of the model are supported: wav2vec2-base is post-norm and has a
group norm in the first convolution. wav2vec2-large is pre-norm and has a layer norm in every
convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedConfig, Wav2Vec2Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bart.layers import LayerDrop

__all__ = [
    "FlaxWav2Vec2ForCTC",
    "FlaxWav2Vec2ForPreTraining",
    "FlaxWav2Vec2GumbelVectorQuantizer",
    "FlaxWav2Vec2Model",
    "FlaxWav2Vec2PreTrainedModel",
    "_compute_mask_indices",
    "_sample_negative_indices",
]

EPSILON = 1e-5  # for the norms that do not use `config.layer_norm_eps`
HE = jax.nn.initializers.he_normal()
#: Default initialization of `torch.nn.Linear`: uniform in ±1 / sqrt(features_in).
UNIFORM = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def dense(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Creates a linear layer with the initialization of the family."""
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_range), rngs)


class ConvLayer(nnx.Module):
    """A convolution, an optional norm, and an activation."""

    def __init__(self, config: PreTrainedConfig, number: int, rngs: nnx.Rngs):
        features = config.conv_dim[number]
        features_in = config.conv_dim[number - 1] if number else 1
        self.conv = nn.Conv(
            features_in,
            features,
            (config.conv_kernel[number],),
            HE,
            rngs,
            stride=config.conv_stride[number],
            use_bias=config.conv_bias,
            bias_init=nn.uniform(features_in * config.conv_kernel[number]),
        )
        norms: dict[str, Callable[[], nnx.Module | None]] = {
            "layer": lambda: nn.LayerNorm(features, EPSILON),
            "group": lambda: None if number else nn.GroupNorm(features, features, EPSILON),
        }
        if config.feat_extract_norm not in norms:
            raise UsageError(
                f"unknown feat_extract_norm '{config.feat_extract_norm}' (known: group, layer)"
            )
        self.layer_norm = nnx.data(norms[config.feat_extract_norm]())
        self.act = nn.activation(config.feat_extract_activation)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, features)
        x = self.conv(x)
        return self.act(x if self.layer_norm is None else self.layer_norm(x))


class FeatureEncoder(nnx.Module):
    """The convolutions that turn audio samples into feature vectors."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        layers = (ConvLayer(config, number, rngs) for number in range(len(config.conv_dim)))
        self.conv_layers = nnx.List(layers)

    def __call__(
        self,
        input_values: jax.Array,  # (batch, samples)
        frozen: bool,
    ) -> jax.Array:  # (batch, frames, features)
        x = input_values[..., None]
        for layer in self.conv_layers:
            x = layer(x)
        return jax.lax.stop_gradient(x) if frozen else x


class FeatureProjection(nnx.Module):
    """Norm, projection to the hidden size and dropout. Also returns the output of the norm.

    The norm is omitted with `feat_proj_layer_norm=False` (HuBERT).
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = config.conv_dim[-1]
        has_norm = getattr(config, "feat_proj_layer_norm", True)
        self.layer_norm = nn.LayerNorm(width, config.layer_norm_eps) if has_norm else nnx.data(None)
        self.projection = self.make_projection(config, rngs)
        self.dropout = nn.Dropout(config.feat_proj_dropout)

    @staticmethod
    def make_projection(config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Linear:
        """Returns the projection, with the initialization of PyTorch's class."""
        width = config.conv_dim[-1]
        return nn.Linear(width, config.hidden_size, UNIFORM, rngs, bias_init=nn.uniform(width))

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, features)
        rngs: Keys | None,
    ) -> tuple[jax.Array, jax.Array]:
        normed = x if self.layer_norm is None else self.layer_norm(x)
        return self.dropout(self.projection(normed), rngs), normed


class WeightNormConv(nn.Conv):
    """A convolution with weight normalization (Salimans and Kingma, 2016).

    The weights of each tap (position in the kernel) are normalized. As in PyTorch, the parameters
    are the directions `weight_v`, `(out, in / groups, taps)`, and the norms `weight_g`, `(1, 1,
    taps)`.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        direction = self.kernel[...].transpose(2, 1, 0)
        del self.kernel
        self.weight_v = nnx.Param(direction)
        self.weight_g = nnx.Param(_tap_norm(direction))

    def gathered_kernel(self) -> jax.Array:
        """Returns the kernel, `(taps, in / groups, out)`, scaled to the norms `weight_g`."""
        direction = self.weight_v[...].astype(jnp.float32)
        return (direction * (self.weight_g[...] / _tap_norm(direction))).transpose(2, 1, 0)


def _tap_norm(taps: jax.Array) -> jax.Array:
    """Returns the norm of each tap, `(1, 1, taps)`, for weights `(out, in / groups, taps)`."""
    return jnp.sqrt(jnp.square(taps).sum((0, 1), keepdims=True))


class PositionalConvEmbedding(nnx.Module):
    """Relative position embeddings, computed by a grouped convolution with a wide kernel."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, taps = config.hidden_size, config.num_conv_pos_embeddings
        if getattr(config, "conv_pos_batch_norm", False):
            raise UsageError(
                "conv_pos_batch_norm=True in the configuration is not supported: position "
                "embeddings with batch normalization are not implemented"
            )
        # Padding keeps the length. If the number of taps is even, one more position is padded on
        # the left.
        self.conv = WeightNormConv(
            width,
            width,
            (taps,),
            UNIFORM,  # as in PyTorch, which does not apply the model's initialization here
            rngs,
            padding=[(taps // 2, (taps - 1) // 2)],
            groups=config.num_conv_pos_embedding_groups,
        )
        self.act = nn.activation(config.feat_extract_activation)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, frames, hidden)
        return self.act(self.conv(x))


class Attention(nnx.Module):
    """Self-attention."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, self.heads = config.hidden_size, config.num_attention_heads
        if width % self.heads:
            raise UsageError(
                f"hidden_size={width} is not a multiple of the {self.heads} attention heads"
            )
        self.rate = config.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            dense(config, width, width, rngs) for _ in range(4)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, hidden)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool,
        position_bias: jax.Array | None = None,  # (1, heads, frames, frames)
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            projection(x).reshape(*x.shape[:2], self.heads, -1)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            bias=None if position_bias is None else self.gate_bias(x, position_bias),
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(attn_output.reshape(x.shape)), weights

    def gate_bias(self, x: jax.Array, position_bias: jax.Array) -> jax.Array:
        """Returns the bias of the attention scores, which may depend on the hidden states `x`.

        Both `position_bias` and the result broadcast to `(batch, heads, frames, frames)`.
        """
        return position_bias


class FeedForward(nnx.Module):
    """Two dense layers with an activation and dropout."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.intermediate_dense = dense(config, width, inner, rngs)
        self.output_dense = dense(config, inner, width, rngs)
        self.act = nn.activation(config.hidden_act)
        self.inner_dropout = nn.Dropout(config.activation_dropout)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.inner_dropout(self.act(self.intermediate_dense(x)), rngs)
        return self.dropout(self.output_dense(x), rngs)


class LanguageAdapter(nnx.Module):
    """Bottleneck adapter of MMS (Pratap et al., 2023), for one layer and one language."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, cast("int", config.adapter_attn_dim)
        self.norm = nn.LayerNorm(width, EPSILON)
        self.linear_1 = dense(config, width, inner, rngs)
        self.linear_2 = dense(config, inner, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, frames, hidden)
        return self.linear_2(jax.nn.relu(self.linear_1(self.norm(x))))


class Layer(nnx.Module):
    """Self-attention and feed-forward. Post-norm, or pre-norm with `do_stable_layer_norm`."""

    def __init__(
        self, config: PreTrainedConfig, rngs: nnx.Rngs, attention: Attention | None = None
    ):
        self.attention = Attention(config, rngs) if attention is None else attention
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config, rngs)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.norm_first = config.do_stable_layer_norm
        has_adapter = self.norm_first and getattr(config, "adapter_attn_dim", None) is not None
        self.adapter_layer = LanguageAdapter(config, rngs) if has_adapter else nnx.data(None)
        self.dropout, self.layerdrop = (
            nn.Dropout(config.hidden_dropout),
            LayerDrop(config.layerdrop),
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, hidden)
        mask: Mask,
        position_bias: jax.Array | None = None,  # (1, heads, frames, frames)
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        inputs, norm_first = x, self.norm_first
        y = self.layer_norm(x) if norm_first else x
        attn_output, weights = self.attention(y, mask, rngs, return_weights, position_bias)
        x = x + self.dropout(attn_output, rngs)
        x = x if norm_first else self.layer_norm(x)
        x = x + self.feed_forward(self.final_layer_norm(x) if norm_first else x, rngs)
        x = x if norm_first else self.final_layer_norm(x)
        if self.adapter_layer is not None:
            x = x + self.adapter_layer(x)
        return self.layerdrop(x, inputs, rngs), weights


class Encoder(nnx.Module):
    """Convolutional position embeddings and a stack of layers."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.pos_conv_embed = PositionalConvEmbedding(config, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = self.make_layers(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm_first = config.do_stable_layer_norm

    def make_layers(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Layers:
        """Returns the layers."""
        return nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))

    def position_bias(self, frames: int) -> jax.Array | None:
        """Returns the bias of the attention scores of all layers, `(1, heads, frames, frames)`."""
        return None

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, hidden)
        mask: jax.Array | None,  # (batch, frames)
        *,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None, tuple[jax.Array, ...] | None]:
        """Runs the encoder.

        Returns:
            The last hidden state, all hidden states or `None`, and the attention weights of all
            layers or `None`.
        """
        if mask is not None:  # otherwise the convolution would mix padding into real frames
            x = jnp.where(mask[..., None] != 0, x, 0)
        x = x + self.pos_conv_embed(x)
        x = self.dropout(x if self.norm_first else self.layer_norm(x), rngs)
        x, weights, inputs = nn.run_layers(
            self.layers,
            x,
            nn.visible(mask),
            self.position_bias(x.shape[1]),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        # As in PyTorch, the final norm is not part of the hidden states.
        states = None if inputs is None else (*inputs, x)
        x = self.layer_norm(x) if self.norm_first else x
        return x, states, weights if output_attentions else None


class AdapterLayer(nnx.Module):
    """A strided convolution with a gated linear unit."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = cast("int", config.output_hidden_size)
        self.conv = nn.Conv(
            width,
            2 * width,
            (config.adapter_kernel_size,),
            HE,
            rngs,
            stride=config.adapter_stride,
            padding=1,
            bias_init=nn.uniform(width * config.adapter_kernel_size),
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, frames, hidden)
        return jax.nn.glu(self.conv(x))


class Adapter(nnx.Module):
    """Strided convolutions after the encoder, which shorten the sequence."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, width_out = config.hidden_size, cast("int", config.output_hidden_size)
        project = width_out != width
        self.proj = dense(config, width, width_out, rngs) if project else nnx.data(None)
        self.proj_layer_norm = nn.LayerNorm(width_out, EPSILON) if project else nnx.data(None)
        self.layers = nnx.List(AdapterLayer(config, rngs) for _ in range(config.num_adapter_layers))

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, frames, hidden)
        if self.proj is not None and self.proj_layer_norm is not None:
            x = self.proj_layer_norm(self.proj(x))
        for layer in self.layers:
            x = layer(x)
        return x


def output_lengths(config: PreTrainedConfig, samples: Any, add_adapter: bool | None = None) -> Any:
    """Returns the number of frames that the model computes from audio.

    Args:
        config: The model's configuration.
        samples: The number of audio samples, an integer or an array.
        add_adapter: Whether to include the adapter. The default is `config.add_adapter`.
    """
    for taps, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - taps) // stride + 1
    if getattr(config, "add_adapter", False) if add_adapter is None else add_adapter:
        for _ in range(config.num_adapter_layers):
            samples = (samples - 1) // config.adapter_stride + 1
    return samples


def frame_mask(
    config: PreTrainedConfig,
    frames: int,
    attention_mask: jax.Array,
    add_adapter: bool | None = None,
) -> jax.Array:
    """Converts the mask of audio samples to a mask of frames, int32 `(batch, frames)`.

    Args:
        config: The model's configuration.
        frames: The number of frames per row.
        attention_mask: The mask of the audio samples, `(batch, samples)`.
        add_adapter: Whether to include the adapter. The default is `config.add_adapter`.
    """
    lengths = output_lengths(config, attention_mask.sum(-1), add_adapter)
    return (jnp.arange(frames) < lengths[:, None]).astype(jnp.int32)


class Wav2Vec2(nnx.Module):
    """Feature encoder, Transformer and optional adapter, without a head.

    Attributes:
        encoder_class: Class of the Transformer.
        projection_class: Class of the projection of the features to the hidden size.
    """

    encoder_class: ClassVar[type[Encoder]] = Encoder
    projection_class: ClassVar[type[FeatureProjection]] = FeatureProjection

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.config = config
        self.feature_extractor = FeatureEncoder(config, rngs)
        self.feature_projection = self.projection_class(config, rngs)
        self.masked_spec_embed = nnx.data(None)
        if config.mask_time_prob > 0 or config.mask_feature_prob > 0:
            uniform = jax.nn.initializers.uniform(1.0)
            shape = (config.hidden_size,)
            self.masked_spec_embed = nnx.Param(uniform(rngs.params(), shape, jnp.float32))
        self.encoder = self.encoder_class(config, rngs)
        has_adapter = getattr(config, "add_adapter", False)
        self.adapter = Adapter(config, rngs) if has_adapter else nnx.data(None)

    def __call__(
        self,
        input_values: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        mask_time_indices: jax.Array | None = None,  # (batch, frames)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        freeze_feature_encoder: bool = False,
    ) -> out.FlaxModelOutput:
        features = self.feature_extractor(input_values, freeze_feature_encoder)
        if attention_mask is not None:
            attention_mask = frame_mask(self.config, features.shape[1], attention_mask, False)
        x, features = self.feature_projection(features, rngs)
        x, states, weights = self.encoder(
            self.apply_time_mask(x, mask_time_indices),
            attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        x = x if self.adapter is None else self.adapter(x)
        return out.FlaxWav2Vec2BaseModelOutput(x, features, states, weights)

    def apply_time_mask(self, x: jax.Array, mask_time_indices: jax.Array | None) -> jax.Array:
        """Replaces frames by the learned mask vector.

        Args:
            x: Frames, `(batch, frames, hidden)`.
            mask_time_indices: `(batch, frames)`, true for the frames to replace. `None` replaces no
                frames.
        """
        if mask_time_indices is None or not self.config.apply_spec_augment:
            return x
        if mask_time_indices.shape != x.shape[:2]:
            raise UsageError(
                f"mask_time_indices have shape {mask_time_indices.shape}, but the audio is encoded "
                f"to {x.shape[1]} frames per row. Use the shape (batch, {x.shape[1]}), see "
                "model._get_feat_extract_output_lengths(samples)"
            )
        if self.masked_spec_embed is None:
            raise UsageError(
                "mask_time_indices need a learned mask vector, which only exists if mask_time_prob "
                "or mask_feature_prob is greater than 0"
            )
        masked = jnp.asarray(mask_time_indices, bool)[..., None]
        return jnp.where(masked, self.masked_spec_embed[...].astype(x.dtype), x)


class CTC(nnx.Module):
    """The encoder with a CTC head, which computes logits of the vocabulary for each frame.

    Attributes:
        model_class: Class of the encoder.
        model_name: Name of the encoder in checkpoints.
    """

    model_class: ClassVar[Callable[..., Any]] = Wav2Vec2
    model_name: ClassVar[str] = "wav2vec2"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        if config.vocab_size is None:
            raise UsageError(
                f"{type(config).__name__}.vocab_size is None. Set it to the vocabulary size"
            )
        setattr(self, self.model_name, self.model_class(config, rngs))
        self.dropout = nn.Dropout(config.final_dropout)
        has_adapter = getattr(config, "add_adapter", False)
        width = config.output_hidden_size if has_adapter else config.hidden_size
        self.lm_head = dense(config, cast("int", width), config.vocab_size, rngs)

    def __call__(
        self,
        input_values: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        mask_time_indices: jax.Array | None = None,  # (batch, frames)
        *,
        rngs: Keys | None = None,
        **options: Any,
    ) -> out.FlaxModelOutput:
        encoded = getattr(self, self.model_name)(
            input_values, attention_mask, mask_time_indices, rngs=rngs, **options
        )
        logits = self.lm_head(self.dropout(encoded.last_hidden_state, rngs))
        return out.FlaxCausalLMOutput(logits, encoded.hidden_states, encoded.attentions)


class GumbelVectorQuantizer(nnx.Module):
    """Quantizes feature vectors with a Gumbel softmax.

    The codebook is divided into groups. A feature vector is replaced by the concatenation of one
    code vector of each group. See Jang et al. (2016), https://arxiv.org/abs/1611.01144.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        groups, codes = config.num_codevector_groups, config.num_codevectors_per_group
        if config.codevector_dim % groups:
            raise UsageError(
                f"codevector_dim={config.codevector_dim} is not a multiple of "
                f"num_codevector_groups={groups}"
            )
        self.groups, uniform = groups, jax.nn.initializers.uniform(1.0)
        shape = (1, groups * codes, config.codevector_dim // groups)
        self.codevectors = nnx.Param(uniform(rngs.params(), shape, jnp.float32))
        self.weight_proj = nn.Linear(config.conv_dim[-1], groups * codes, nn.normal(1.0), rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, frames, features)
        mask: jax.Array | None,  # (batch, frames)
        temperature: float | jax.Array,
        keys: Keys | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Quantizes feature vectors.

        Args:
            x: Feature vectors, `(batch, frames, features)`.
            mask: The frames to include in the perplexity, `(batch, frames)`. `None` includes all.
            temperature: Temperature of the Gumbel softmax.
            keys: PRNG keys to sample the codes, with straight-through gradients. `None` selects the
                most probable codes.

        Returns:
            The code vectors, `(batch, frames, codevector_dim)`, and the perplexity of the codes.
        """
        logits = self.weight_proj(x).astype(jnp.float32)
        logits = logits.reshape(*x.shape[:2], self.groups, -1)
        if keys is None:
            one_hot = probs = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
        else:
            soft = jax.nn.softmax((logits + _gumbel(keys, logits.shape)) / temperature)
            hard = jax.nn.one_hot(soft.argmax(-1), logits.shape[-1])
            one_hot, probs = hard + soft - jax.lax.stop_gradient(soft), jax.nn.softmax(logits)
        perplexity = self._compute_perplexity(probs, mask)
        codes = self.codevectors[...].reshape(self.groups, logits.shape[-1], -1)
        vectors = jnp.einsum("blgv,gvd->blgd", one_hot, codes)
        return vectors.reshape(*x.shape[:2], -1).astype(x.dtype), perplexity

    @staticmethod
    def _compute_perplexity(probs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns the perplexity of the codes, summed over groups.

        Args:
            probs: Code probabilities, `(..., groups, codes)`.
            mask: The frames to include, `(...)`. `None` includes all.
        """
        probs = probs.reshape(-1, *probs.shape[-2:])
        weight = jnp.ones(len(probs)) if mask is None else mask.reshape(-1).astype(jnp.float32)
        mean = (probs * weight[:, None, None]).sum(0) / jnp.maximum(weight.sum(), 1)
        return jnp.exp(-jax.scipy.special.xlogy(mean, mean).sum(-1)).sum()


FlaxWav2Vec2GumbelVectorQuantizer = GumbelVectorQuantizer


def _gumbel(keys: Keys, shape: tuple[int, ...]) -> jax.Array:
    """Draws Gumbel noise. If there is one PRNG key per row, each row uses its own key."""
    key = keys.child().key
    if not key.ndim:
        return jax.random.gumbel(key, shape)
    rows = (shape[0] // len(key), *shape[1:])
    return jax.vmap(lambda row_key: jax.random.gumbel(row_key, rows))(key).reshape(shape)


class PreTraining(nnx.Module):
    """The pretraining model, which returns predictions for masked frames and quantized targets."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.wav2vec2 = Wav2Vec2(config, rngs)
        self.dropout_features = nn.Dropout(config.feat_quantizer_dropout)
        self.quantizer = GumbelVectorQuantizer(config, rngs)
        width = config.proj_codevector_dim
        self.project_hid = nn.Linear(
            config.hidden_size, width, UNIFORM, rngs, bias_init=nn.uniform(config.hidden_size)
        )
        self.project_q = nn.Linear(
            config.codevector_dim, width, UNIFORM, rngs, bias_init=nn.uniform(config.codevector_dim)
        )

    def __call__(
        self,
        input_values: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        mask_time_indices: jax.Array | None = None,  # (batch, frames)
        gumbel_temperature: float | jax.Array = 1,
        *,
        rngs: Keys | None = None,
        gumbel_rng: Keys | None = None,
        **options: Any,
    ) -> out.FlaxModelOutput:
        encoded = self.wav2vec2(
            input_values, attention_mask, mask_time_indices, rngs=rngs, **options
        )
        keys = (gumbel_rng or rngs) if nn.current_options().train else None
        if keys is None and nn.current_options().train:
            raise UsageError("train=True samples code vectors: pass gumbel_rng=jax.random.key(...)")
        features = self.dropout_features(encoded.extract_features, rngs)
        quantized, perplexity = self.quantizer(
            features, mask_time_indices, gumbel_temperature, keys
        )
        return out.FlaxWav2Vec2ForPreTrainingOutput(
            self.project_hid(encoded.last_hidden_state),
            self.project_q(quantized),
            perplexity,
            encoded.hidden_states,
            encoded.attentions,
        )


class FlaxWav2Vec2PreTrainedModel(FlaxPreTrainedModel):
    """Base class of the wav2vec 2.0 models: configuration, checkpoint names and call signature."""

    config_class: ClassVar[type[PreTrainedConfig]] = Wav2Vec2Config
    base_model_prefix = "wav2vec2"
    main_input_name = "input_values"
    weight_templates = {
        "weight_g": "parametrizations.weight.original0",
        "weight_v": "parametrizations.weight.original1",
    }
    # In files that were written before PyTorch 2, the tensors are named `weight_g` and `weight_v`.
    weight_synonyms = weight_templates

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_values: Input,
        attention_mask: Input = None,
        mask_time_indices: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        freeze_feature_encoder: bool = False,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_values: Audio samples, `(batch, samples)`.
            attention_mask: Mask of the audio samples, `(batch, samples)`, 0 for padding.
            mask_time_indices: `(batch, frames)`, true for the frames that are replaced by a learned
                mask vector.
            freeze_feature_encoder: Whether the convolutions get no gradient.
        """
        model_inputs = {
            "input_values": self._prepare_audio(input_values),
            "attention_mask": attention_mask,
            "mask_time_indices": mask_time_indices,
            **inputs,
        }
        if freeze_feature_encoder:
            model_inputs["freeze_feature_encoder"] = True
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def _prepare_audio(self, values: Any) -> jax.Array:
        """Returns audio as float32, `(batch, samples)`.

        Raises:
            UsageError: The shape is wrong, or the audio is too short for one frame.
        """
        try:
            values = jnp.asarray(values, jnp.float32)
        except ValueError:
            raise UsageError(
                "input_values has rows of different lengths: pad them (feature_extractor(audio, "
                'padding=True, return_tensors="np")) and also pass the attention_mask'
            ) from None
        if values.ndim != 2:
            raise UsageError(
                f"input_values have shape {values.shape}, but {type(self).__name__} expects "
                "(batch, samples). Pass a single audio as a batch of one: input_values[None]"
            )
        if output_lengths(self.config, values.shape[1], add_adapter=False) < 1:
            minimum = 1
            for taps, stride in zip(
                self.config.conv_kernel[::-1], self.config.conv_stride[::-1], strict=True
            ):
                minimum = (minimum - 1) * stride + taps
            raise UsageError(
                f"input_values have {values.shape[1]} samples per row, which is too short for "
                f"{type(self).__name__}: it needs {minimum} or more"
            )
        return values

    def _example_shape(self) -> tuple[Any, ...]:
        return (1, 1024)

    def _get_feat_extract_output_lengths(
        self, input_lengths: jax.Array | int, add_adapter: bool | None = None
    ) -> Any:
        """Returns the number of frames that the model computes from a number of samples."""
        return output_lengths(self.config, input_lengths, add_adapter)

    def _get_feature_vector_attention_mask(
        self,
        feature_vector_length: int,
        attention_mask: jax.Array,
        add_adapter: bool | None = None,
    ) -> jax.Array:
        """Converts the mask of audio samples, `(batch, samples)`, to a mask of frames."""
        mask = jnp.asarray(attention_mask)
        return frame_mask(self.config, feature_vector_length, mask, add_adapter)


class FlaxWav2Vec2Model(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 without a head. Returns hidden states and extracted features."""

    module_class = Wav2Vec2


class FlaxWav2Vec2ForCTC(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 with a CTC head, for speech recognition."""

    module_class = CTC


class FlaxWav2Vec2ForPreTraining(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 with a quantizer, for pretraining on speech without text."""

    module_class = PreTraining

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_values: Input,
        attention_mask: Input = None,
        mask_time_indices: Input = None,
        gumbel_temperature: float = 1,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        gumbel_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        freeze_feature_encoder: bool = False,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model. See :class:`FlaxWav2Vec2PreTrainedModel` for the other arguments.

        Args:
            gumbel_temperature: Temperature of the Gumbel softmax that samples code vectors. Higher
                values distribute the gradient more evenly over the codes.
            gumbel_rng: PRNG key to sample code vectors in training. The default is `dropout_rng`.
        """
        quantizer_inputs: dict[str, Any] = {
            "gumbel_temperature": gumbel_temperature,
            "gumbel_rng": nn.make_keys(gumbel_rng),
        }
        return super().__call__(
            input_values,
            attention_mask,
            mask_time_indices,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            freeze_feature_encoder,
            return_dict,
            extra=extra,
            **inputs,
            **quantizer_inputs,
        )


# -- NumPy functions for the preparation of batches
# Both use `np.random`, because scripts for Transformers 4 set its seed.


def _compute_mask_indices(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: np.ndarray | None = None,
    min_masks: int = 0,
) -> np.ndarray:
    """Draws the spans of frames to mask.

    With the same seed of `np.random`, the spans equal those of the function of this name in
    PyTorch's module.

    Args:
        shape: `(batch, frames)`.
        mask_prob: The fraction of frames to mask per row. Overlapping spans mask fewer frames.
        mask_length: The length of a span in frames.
        attention_mask: `(batch, frames)`, 0 for padding. Spans do not contain padding.
        min_masks: The minimum number of spans per row.

    Returns:
        A boolean array, `(batch, frames)`.
    """
    batch, length = shape
    if not 1 <= mask_length <= length:
        raise UsageError(
            f"mask_length={mask_length} has to be between 1 and the {length} frames of a row"
        )
    rounding = np.random.rand(1).item()  # noqa: NPY002

    def spans(frames: int) -> int:
        count = max(int(mask_prob * frames / mask_length + rounding), min_masks)
        return max(min(count, length // mask_length, frames - mask_length + 1), 0)

    mask = np.zeros(shape, bool)
    if not spans(length):
        return mask
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    for row, row_frames in zip(mask, map(int, frames), strict=True):
        candidates = np.arange(max(row_frames - mask_length + 1, 0))
        starts = np.random.choice(candidates, spans(row_frames), replace=False)  # noqa: NPY002
        row[starts[:, None] + np.arange(mask_length)] = True
        if not len(starts):  # like PyTorch, mask the last frame, which may be padding
            row[-1] = True
    return mask


def _sample_negative_indices(
    features_shape: tuple[int, ...], num_negatives: int, attention_mask: np.ndarray | None = None
) -> np.ndarray:
    """Draws negative examples for every frame from the other frames of the same row.

    Args:
        features_shape: A shape that starts with `(batch, frames)`.
        num_negatives: The number of negative examples per frame.
        attention_mask: `(batch, frames)`, 0 for padding.

    Returns:
        Indices into the flattened frames of the batch, int32 `(batch, frames * num_negatives)`.
    """
    batch, length = features_shape[:2]
    if length < 2:
        raise UsageError(
            f"features of shape {tuple(features_shape)} have no negative examples: rows need 2 "
            "frames or more"
        )
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    positive = np.repeat(np.arange(length), num_negatives)
    size = len(positive)
    rows = [np.random.randint(0, max(int(n) - 1, 1), size=size) for n in frames]  # noqa: NPY002
    negatives = np.asarray(rows, np.int32)
    negatives[negatives >= positive] += 1  # skip the frame itself
    return negatives + np.arange(batch, dtype=np.int32)[:, None] * length
