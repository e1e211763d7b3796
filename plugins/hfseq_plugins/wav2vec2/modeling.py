"""wav2vec 2.0 (Baevski et al., 2020) on Flax NNX; attribute names are the checkpoint's.

Convolutions make a vector of every few samples of sound, a Transformer reads those vectors. Both
kinds of checkpoints are read: wav2vec2-base (a group norm in the first convolution alone, norms
behind the blocks) and wav2vec2-large (layer norms in all of them, norms before the blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import Wav2Vec2Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
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

EPSILON = 1e-5  # of the norms whose own the configuration does not say
HE = jax.nn.initializers.he_normal()
#: How PyTorch draws a Linear: uniform within 1 / sqrt(inputs).
UNIFORM = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def dense(config: Wav2Vec2Config, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A Linear with the family's initialisation."""
    return nn.Linear(features_in, features_out, nn.normal(config.initializer_range), rngs)


class ConvLayer(nnx.Module):
    """A convolution with its norm, if it has one, and its activation."""

    def __init__(self, config: Wav2Vec2Config, number: int, rngs: nnx.Rngs):
        features, before = config.conv_dim[number], config.conv_dim[number - 1] if number else 1
        self.conv = nn.Conv(
            before,
            features,
            (config.conv_kernel[number],),
            HE,
            rngs,
            stride=config.conv_stride[number],
            use_bias=config.conv_bias,
        )
        norms: dict[str, Callable[[], nnx.Module | None]] = {
            "layer": lambda: nn.LayerNorm(features, EPSILON),
            "group": lambda: None if number else nn.GroupNorm(features, features, EPSILON),
        }
        if config.feat_extract_norm not in norms:
            raise UsageError(
                f"feat_extract_norm is '{config.feat_extract_norm}': there are 'group' and 'layer'"
            )
        self.layer_norm = nnx.data(norms[config.feat_extract_norm]())
        self.act = nn.activation(config.feat_extract_activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        return self.act(x if self.layer_norm is None else self.layer_norm(x))


class FeatureEncoder(nnx.Module):
    """Vectors of sound, one for every few samples."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        layers = (ConvLayer(config, number, rngs) for number in range(len(config.conv_dim)))
        self.conv_layers = nnx.List(layers)

    def __call__(self, input_values: jax.Array, frozen: bool) -> jax.Array:
        x = input_values[..., None]
        for layer in self.conv_layers:
            x = layer(x)
        return jax.lax.stop_gradient(x) if frozen else x


class FeatureProjection(nnx.Module):
    """The vectors, normed, in the width of the Transformer; and as they were normed."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width = config.conv_dim[-1]
        self.layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.projection = nn.Linear(width, config.hidden_size, UNIFORM, rngs)
        self.dropout = nn.Dropout(config.feat_proj_dropout)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> tuple[jax.Array, jax.Array]:
        normed = self.layer_norm(x)
        return self.dropout(self.projection(normed), rngs), normed


class WeightNormConv(nn.Conv):
    """A convolution whose taps are directions with a length each (Salimans and Kingma, 2016).

    ``weight_v`` (out, in / groups, taps) and ``weight_g`` (1, 1, taps) lie as in PyTorch.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        direction = self.kernel[...].transpose(2, 1, 0)
        del self.kernel
        self.weight_v = nnx.Param(direction)
        self.weight_g = nnx.Param(_length(direction))

    def gathered_kernel(self) -> jax.Array:
        """Return the kernel: each tap's direction times its length."""
        direction = self.weight_v[...].astype(jnp.float32)
        return (direction * (self.weight_g[...] / _length(direction))).transpose(2, 1, 0)


def _length(taps: jax.Array) -> jax.Array:
    """Return the length of each tap (out, in / groups, taps): (1, 1, taps)."""
    return jnp.sqrt(jnp.square(taps).sum((0, 1), keepdims=True))


class PositionalConvEmbedding(nnx.Module):
    """What a wide convolution says of the places around each."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width, taps = config.hidden_size, config.num_conv_pos_embeddings
        # Of an even number of taps one more lies before than behind: as many places as before.
        self.conv = WeightNormConv(
            width,
            width,
            (taps,),
            nn.normal(2 / math.sqrt(taps * width)),
            rngs,
            padding=[(taps // 2, (taps - 1) // 2)],
            groups=config.num_conv_pos_embedding_groups,
        )
        self.act = nn.activation(config.feat_extract_activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.conv(x))


class Attention(nnx.Module):
    """Attention of a sequence to itself."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width, self.heads = config.hidden_size, config.num_attention_heads
        if width % self.heads:
            raise UsageError(
                f"hidden_size={width} is not a multiple of the {self.heads} attention heads"
            )
        self.rate = config.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            dense(config, width, width, rngs) for _ in range(4)
        )

    def __call__(self, x, mask, rngs, return_weights):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_proj(mixed.reshape(x.shape)), weights


class FeedForward(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.intermediate_dense = dense(config, width, inner, rngs)
        self.output_dense = dense(config, inner, width, rngs)
        self.act = nn.activation(config.hidden_act)
        self.inner_dropout = nn.Dropout(config.activation_dropout)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        x = self.inner_dropout(self.act(self.intermediate_dense(x)), rngs)
        return self.dropout(self.output_dense(x), rngs)


class LanguageAdapter(nnx.Module):
    """What a layer of MMS learns for each language (Pratap et al., 2023)."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.adapter_attn_dim
        self.norm = nn.LayerNorm(width, EPSILON)
        self.linear_1 = dense(config, width, inner, rngs)
        self.linear_2 = dense(config, inner, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(jax.nn.relu(self.linear_1(self.norm(x))))


class Layer(nnx.Module):
    """Attention and feed-forward, the norms before them (``do_stable_layer_norm``) or behind."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config, rngs)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.norm_first = config.do_stable_layer_norm
        adapted = self.norm_first and config.adapter_attn_dim is not None
        self.adapter_layer = LanguageAdapter(config, rngs) if adapted else nnx.data(None)
        self.dropout, self.layerdrop = (
            nn.Dropout(config.hidden_dropout),
            LayerDrop(config.layerdrop),
        )

    def __call__(self, x, mask, *, rngs, return_weights=False):
        before, first = x, self.norm_first
        y = self.layer_norm(x) if first else x
        mixed, weights = self.attention(y, mask, rngs, return_weights)
        x = x + self.dropout(mixed, rngs)
        x = x if first else self.layer_norm(x)
        x = x + self.feed_forward(self.final_layer_norm(x) if first else x, rngs)
        x = x if first else self.final_layer_norm(x)
        if self.adapter_layer is not None:
            x = x + self.adapter_layer(x)
        return self.layerdrop(x, before, rngs), weights


class Encoder(nnx.Module):
    """Places from a convolution, and the stack of layers."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        self.pos_conv_embed = PositionalConvEmbedding(config, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.norm_first = config.do_stable_layer_norm

    def __call__(self, x, mask, *, rngs, output_attentions, output_hidden_states):
        """Return the last hidden state, all of them, and the weights, where they are asked for."""
        if mask is not None:  # or the convolution would read what padding became
            x = jnp.where(mask[..., None] != 0, x, 0)
        x = x + self.pos_conv_embed(x)
        x = self.dropout(x if self.norm_first else self.layer_norm(x), rngs)
        x, weights, inputs = nn.run_layers(
            self.layers,
            x,
            nn.visible(mask),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.layer_norm(x) if self.norm_first else x
        states = (*inputs, x) if output_hidden_states else None
        return x, states, weights if output_attentions else None


class AdapterLayer(nnx.Module):
    """A convolution that shortens, and a gate."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width = config.output_hidden_size
        self.conv = nn.Conv(
            width,
            2 * width,
            (config.adapter_kernel_size,),
            HE,
            rngs,
            stride=config.adapter_stride,
            padding=1,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.glu(self.conv(x))


class Adapter(nnx.Module):
    """Convolutions behind the encoder that bring sound nearer to the length of its text."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        width, wanted = config.hidden_size, config.output_hidden_size
        other = wanted != width
        self.proj = dense(config, width, wanted, rngs) if other else nnx.data(None)
        self.proj_layer_norm = nn.LayerNorm(wanted, EPSILON) if other else nnx.data(None)
        self.layers = nnx.List(AdapterLayer(config, rngs) for _ in range(config.num_adapter_layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.proj is None else self.proj_layer_norm(self.proj(x))
        for layer in self.layers:
            x = layer(x)
        return x


def output_lengths(config: Wav2Vec2Config, samples: Any, add_adapter: bool | None = None) -> Any:
    """Return how many vectors are made of so many samples, a number or an array of them."""
    for taps, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - taps) // stride + 1
    if config.add_adapter if add_adapter is None else add_adapter:
        for _ in range(config.num_adapter_layers):
            samples = (samples - 1) // config.adapter_stride + 1
    return samples


def frame_mask(
    config: Wav2Vec2Config, frames: int, attention_mask: jax.Array, add_adapter: bool | None = None
) -> jax.Array:
    """Return the mask (batch, frames) of sound whose mask is (batch, samples)."""
    lengths = output_lengths(config, attention_mask.sum(-1), add_adapter)
    return (jnp.arange(frames) < lengths[:, None]).astype(jnp.int32)


class Wav2Vec2(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        self.config = config
        self.feature_extractor = FeatureEncoder(config, rngs)
        self.feature_projection = FeatureProjection(config, rngs)
        self.masked_spec_embed = nnx.data(None)
        if config.mask_time_prob > 0 or config.mask_feature_prob > 0:
            uniform = jax.nn.initializers.uniform(1.0)
            shape = (config.hidden_size,)
            self.masked_spec_embed = nnx.Param(uniform(rngs.params(), shape, jnp.float32))
        self.encoder = Encoder(config, rngs)
        self.adapter = Adapter(config, rngs) if config.add_adapter else nnx.data(None)

    def __call__(
        self,
        input_values,
        attention_mask=None,
        mask_time_indices=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
        freeze_feature_encoder=False,
    ):
        features = self.feature_extractor(input_values, freeze_feature_encoder)
        if attention_mask is not None:
            attention_mask = frame_mask(self.config, features.shape[1], attention_mask, False)
        x, features = self.feature_projection(features, rngs)
        x, states, weights = self.encoder(
            self.hide(x, mask_time_indices),
            attention_mask,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        x = x if self.adapter is None else self.adapter(x)
        return out.FlaxWav2Vec2BaseModelOutput(x, features, states, weights)

    def hide(self, x: jax.Array, mask_time_indices: jax.Array | None) -> jax.Array:
        """Put the learned vector where ``mask_time_indices`` (batch, frames) say so."""
        if mask_time_indices is None or not self.config.apply_spec_augment:
            return x
        if mask_time_indices.shape != x.shape[:2]:
            raise UsageError(
                f"mask_time_indices have shape {mask_time_indices.shape}, but the sound becomes "
                f"{x.shape[1]} vectors a row: (batch, {x.shape[1]}), see "
                "model._get_feat_extract_output_lengths(samples)"
            )
        if self.masked_spec_embed is None:
            raise UsageError(
                "mask_time_indices hide vectors behind a learned one, which models have whose "
                "mask_time_prob or mask_feature_prob is more than 0"
            )
        hidden = jnp.asarray(mask_time_indices, bool)[..., None]
        return jnp.where(hidden, self.masked_spec_embed[...].astype(x.dtype), x)


class CTC(nnx.Module):
    """Logits of a letter, or none, for each vector."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        if config.vocab_size is None:
            raise UsageError("Wav2Vec2Config.vocab_size is None: give the size of the vocabulary")
        self.wav2vec2 = Wav2Vec2(config, rngs)
        self.dropout = nn.Dropout(config.final_dropout)
        width = config.output_hidden_size if config.add_adapter else config.hidden_size
        self.lm_head = dense(config, width, config.vocab_size, rngs)

    def __call__(
        self, input_values, attention_mask=None, mask_time_indices=None, *, rngs=None, **options
    ):
        encoded = self.wav2vec2(
            input_values, attention_mask, mask_time_indices, rngs=rngs, **options
        )
        logits = self.lm_head(self.dropout(encoded.last_hidden_state, rngs))
        return out.FlaxCausalLMOutput(logits, encoded.hidden_states, encoded.attentions)


class GumbelVectorQuantizer(nnx.Module):
    """One vector of each of several groups for each vector of sound (Jang et al., 2016)."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        groups, each = config.num_codevector_groups, config.num_codevectors_per_group
        if config.codevector_dim % groups:
            raise UsageError(
                f"codevector_dim={config.codevector_dim} is not a multiple of "
                f"num_codevector_groups={groups}"
            )
        self.groups, uniform = groups, jax.nn.initializers.uniform(1.0)
        shape = (1, groups * each, config.codevector_dim // groups)
        self.codevectors = nnx.Param(uniform(rngs.params(), shape, jnp.float32))
        self.weight_proj = nn.Linear(config.conv_dim[-1], groups * each, nn.normal(1.0), rngs)

    def __call__(
        self,
        x: jax.Array,
        hidden: jax.Array | None,
        temperature: float | jax.Array,
        keys: Keys | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the chosen vectors, and how many of them are in use where ``hidden`` says so.

        With ``keys`` the choice is drawn, and passes on the gradient of its probabilities.
        """
        logits = self.weight_proj(x).astype(jnp.float32)
        logits = logits.reshape(*x.shape[:2], self.groups, -1)
        if keys is None:
            chosen = shares = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
        else:
            noisy = jax.nn.softmax((logits + _gumbel(keys, logits.shape)) / temperature)
            hard = jax.nn.one_hot(noisy.argmax(-1), logits.shape[-1])
            chosen, shares = hard + noisy - jax.lax.stop_gradient(noisy), jax.nn.softmax(logits)
        perplexity = self._compute_perplexity(shares, hidden)
        codes = self.codevectors[...].reshape(self.groups, logits.shape[-1], -1)
        vectors = jnp.einsum("blgv,gvd->blgd", chosen, codes)
        return vectors.reshape(*x.shape[:2], -1).astype(x.dtype), perplexity

    @staticmethod
    def _compute_perplexity(probs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Return how many vectors are in use where ``mask`` (frames) says so, over all groups.

        ``probs`` (frames, groups, vectors) are shares of a frame's choice; frames may be rows of
        frames.
        """
        probs = probs.reshape(-1, *probs.shape[-2:])
        weight = jnp.ones(len(probs)) if mask is None else mask.reshape(-1).astype(jnp.float32)
        used = (probs * weight[:, None, None]).sum(0) / jnp.maximum(weight.sum(), 1)
        return jnp.exp(-jax.scipy.special.xlogy(used, used).sum(-1)).sum()


FlaxWav2Vec2GumbelVectorQuantizer = GumbelVectorQuantizer


def _gumbel(keys: Keys, shape: tuple[int, ...]) -> jax.Array:
    """Draw Gumbel noise; with a key a row that of a row depends on its key alone."""
    key = keys.child().key
    if not key.ndim:
        return jax.random.gumbel(key, shape)
    rows = (shape[0] // len(key), *shape[1:])
    return jax.vmap(lambda own: jax.random.gumbel(own, rows))(key).reshape(shape)


class PreTraining(nnx.Module):
    """The encoder's guesses of what is hidden, and what it was, both in one space."""

    def __init__(self, config: Wav2Vec2Config, rngs: nnx.Rngs):
        self.wav2vec2 = Wav2Vec2(config, rngs)
        self.dropout_features = nn.Dropout(config.feat_quantizer_dropout)
        self.quantizer = GumbelVectorQuantizer(config, rngs)
        width = config.proj_codevector_dim
        self.project_hid = nn.Linear(config.hidden_size, width, UNIFORM, rngs)
        self.project_q = nn.Linear(config.codevector_dim, width, UNIFORM, rngs)

    def __call__(
        self,
        input_values,
        attention_mask=None,
        mask_time_indices=None,
        gumbel_temperature=1,
        *,
        rngs=None,
        gumbel_rng=None,
        **options,
    ):
        encoded = self.wav2vec2(
            input_values, attention_mask, mask_time_indices, rngs=rngs, **options
        )
        keys = (gumbel_rng or rngs) if nn.current_options().train else None
        if keys is None and nn.current_options().train:
            raise UsageError("train=True draws code vectors: give gumbel_rng=jax.random.key(...)")
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
    """Base of the wav2vec 2.0 classes: configuration, checkpoint names, the call of Transformers 4.

    ``input_values`` are floats (batch, samples), ``attention_mask`` is 0 where a row is padded.
    ``mask_time_indices`` (batch, frames) hide vectors of sound behind a learned one; with
    ``freeze_feature_encoder`` the convolutions get no gradient.
    """

    config_class = Wav2Vec2Config
    base_model_prefix = "wav2vec2"
    main_input_name = "input_values"
    weight_templates = {
        "weight_g": "parametrizations.weight.original0",
        "weight_v": "parametrizations.weight.original1",
    }
    # Files that were written before PyTorch 2 have the names of the tree.
    weight_synonyms = weight_templates

    def __call__(  # type: ignore[override]
        self,
        input_values,
        attention_mask=None,
        mask_time_indices=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        freeze_feature_encoder=False,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`."""
        given = {
            "input_values": self._prepare_audio(input_values),
            "attention_mask": attention_mask,
            "mask_time_indices": mask_time_indices,
            **inputs,
        }
        if freeze_feature_encoder:
            given["freeze_feature_encoder"] = True
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def _prepare_audio(self, values: Any) -> jax.Array:
        """Return sound as floats; refuse what has another shape, or is too short for one vector."""
        try:
            values = jnp.asarray(values, jnp.float32)
        except ValueError:
            raise UsageError(
                "input_values has rows of different lengths: pad them (feature_extractor(sounds, "
                'padding=True, return_tensors="np")) and pass the attention_mask too'
            ) from None
        if values.ndim != 2:
            raise UsageError(
                f"input_values have shape {values.shape}; {type(self).__name__} takes (batch, "
                "samples): one sound is a batch of one, input_values[None]"
            )
        if output_lengths(self.config, values.shape[1], add_adapter=False) < 1:
            least = 1
            for taps, stride in zip(
                self.config.conv_kernel[::-1], self.config.conv_stride[::-1], strict=True
            ):
                least = (least - 1) * stride + taps
            raise UsageError(
                f"input_values have {values.shape[1]} samples a row, of which "
                f"{type(self).__name__} makes no vector: it takes {least} or more"
            )
        return values

    def _example_shape(self) -> tuple[Any, ...]:
        return (1, 1024)

    def _get_feat_extract_output_lengths(
        self, input_lengths: jax.Array | int, add_adapter: bool | None = None
    ) -> Any:
        """Return how many vectors become of so many samples."""
        return output_lengths(self.config, input_lengths, add_adapter)

    def _get_feature_vector_attention_mask(
        self,
        feature_vector_length: int,
        attention_mask: jax.Array,
        add_adapter: bool | None = None,
    ) -> jax.Array:
        """Return the mask of the vectors of sound whose mask is (batch, samples)."""
        mask = jnp.asarray(attention_mask)
        return frame_mask(self.config, feature_vector_length, mask, add_adapter)


class FlaxWav2Vec2Model(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 without a head: hidden states, and the vectors of sound that they are made of."""

    module_class = Wav2Vec2


class FlaxWav2Vec2ForCTC(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 with logits of letters, for speech recognition."""

    module_class = CTC


class FlaxWav2Vec2ForPreTraining(FlaxWav2Vec2PreTrainedModel):
    """wav2vec 2.0 with a quantizer, for training on speech without text."""

    module_class = PreTraining

    def __call__(  # type: ignore[override]
        self,
        input_values,
        attention_mask=None,
        mask_time_indices=None,
        gumbel_temperature=1,
        params=None,
        dropout_rng=None,
        gumbel_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        freeze_feature_encoder=False,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``gumbel_rng`` draws the code vectors while training (default: ``dropout_rng`` does);
        the higher ``gumbel_temperature``, the more even the gradient of that choice.
        """
        own = {"gumbel_temperature": gumbel_temperature, "gumbel_rng": nn.make_keys(gumbel_rng)}
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
            **own,
        )


# -- for data: NumPy; both draw from ``np.random``, which programs of Transformers 4 seed


def _compute_mask_indices(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: np.ndarray | None = None,
    min_masks: int = 0,
) -> np.ndarray:
    """Draw spans to hide, with ``np.random``: a boolean array of ``shape`` (batch, frames).

    Of each row about ``mask_prob`` is hidden (less, where spans overlap), in spans of
    ``mask_length``, at least ``min_masks`` of them; ``attention_mask`` (batch, frames) tells how
    long each row is, and spans begin where they fit into it. The draws are those of PyTorch's
    function.
    """
    batch, length = shape
    if not 1 <= mask_length <= length:
        raise UsageError(
            f"mask_length is {mask_length}: it has to be from 1 to the {length} frames of a row"
        )
    rounding = np.random.rand(1).item()  # noqa: NPY002

    def spans(frames: int) -> int:
        wanted = max(int(mask_prob * frames / mask_length + rounding), min_masks)
        return max(min(wanted, length // mask_length, frames - mask_length + 1), 0)

    mask = np.zeros(shape, bool)
    if not spans(length):
        return mask
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    for row, own in zip(mask, map(int, frames), strict=True):
        starts = np.arange(max(own - mask_length + 1, 0))
        chosen = np.random.choice(starts, spans(own), replace=False)  # noqa: NPY002
        row[chosen[:, None] + np.arange(mask_length)] = True
        if not len(chosen):  # as PyTorch: it hides a frame of padding rather than none
            row[-1] = True
    return mask


def _sample_negative_indices(
    features_shape: tuple[int, ...], num_negatives: int, attention_mask: np.ndarray | None = None
) -> np.ndarray:
    """Draw, for every frame, others of its row: int32 (batch, frames * num_negatives).

    ``features_shape`` begins with (batch, frames). The numbers are those of the frames of the whole
    batch, one row after the other; ``attention_mask`` (batch, frames) tells how long each row is.
    """
    batch, length = features_shape[:2]
    if length < 2:
        raise UsageError(
            f"features of shape {tuple(features_shape)} have nothing to be told apart from: rows "
            "need 2 frames or more"
        )
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    own = np.repeat(np.arange(length), num_negatives)
    rows = [np.random.randint(0, max(int(n) - 1, 1), size=len(own)) for n in frames]  # noqa: NPY002
    drawn = np.asarray(rows, np.int32)
    drawn[drawn >= own] += 1  # any frame but its own, each as often
    return drawn + np.arange(batch, dtype=np.int32)[:, None] * length
