"""Whisper (Radford et al., 2022, https://arxiv.org/abs/2212.04356) on Flax NNX.

The model is a pre-norm BART whose encoder reads spectrograms of exactly 30 seconds. Attributes are
named as in checkpoints.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from transformers import PreTrainedConfig, WhisperConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxSeq2SeqPreTrainedModel, Seq2SeqGeneration
from hfseq.modeling.base import Input
from hfseq.modeling.seq2seq import EncoderOutputs
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.common import num_labels
from hfseq_plugins.whisper.generation import WhisperGeneration
from hfseq_plugins.xglm.modeling import sinusoids


class Attention(layers.Attention):
    """BART's attention without a bias of the key projection, which would not change the result."""

    def __init__(self, config: PreTrainedConfig, heads: int, rngs: nnx.Rngs, **options: bool):
        super().__init__(config, heads, rngs, **options)
        width, init = config.d_model, nn.normal(config.init_std)
        self.k_proj = nn.Linear(width, width, init, rngs, use_bias=False)


class EncoderLayer(layers.EncoderLayer):
    """Pre-norm self-attention and feed-forward."""

    norm_first, attention = True, Attention


class DecoderLayer(layers.DecoderLayer):
    """Pre-norm self-attention, cross-attention and feed-forward."""

    norm_first, attention = True, Attention


def sinusoidal_embedding_init(
    key: jax.Array | None, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Returns sinusoids, `(length, width)`. Transformers 4 also defines this function.

    Args:
        key: Ignored. Initializers have this argument.
        shape: `(length, width)`.
        dtype: The dtype.
    """
    return jnp.asarray(sinusoids(*shape, None), dtype)


class EncoderPositions(nn.Embed):
    """Sinusoidal position embeddings, which are part of checkpoints but not trained."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        size = (config.max_source_positions, config.d_model)
        super().__init__(*size, sinusoidal_embedding_init, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps position IDs, `(...)`, to embeddings, `(..., hidden)`."""
        return jax.lax.stop_gradient(super().__call__(ids))


class DecoderPositions(nn.Embed):
    """Learned position embeddings without the unused embeddings of BART."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        size = (config.max_target_positions, config.d_model)
        super().__init__(*size, nn.normal(config.init_std), rngs)


class Encoder(layers.Encoder):
    """Two convolutions and a stack of layers. The second convolution halves the length."""

    layer, positions = EncoderLayer, EncoderPositions
    embedding_norm, norm_first = False, True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=False)
        width, init = config.d_model, nn.normal(config.init_std)
        self.conv1 = nn.Conv(config.num_mel_bins, width, (3,), init, rngs, padding=1)
        self.conv2 = nn.Conv(width, width, (3,), init, rngs, stride=2, padding=1)
        self.shape = (config.num_mel_bins, 2 * config.max_source_positions)

    def embed(
        self,
        shared: nn.Embed | None,
        ids: jax.Array,  # spectrograms, (batch, mels, frames)
        positions: jax.Array | None,
        segments: jax.Array | None,
        rngs: Keys | None,
    ) -> jax.Array:
        """Maps spectrograms `(batch, mels, frames)` to `(batch, frames / 2, hidden)`."""
        if ids.shape[1:] != self.shape:
            bands, frames = self.shape
            raise UsageError(
                f"input_features have shape {ids.shape}, but this model expects (batch, {bands}, "
                f"{frames}). Compute them with the checkpoint's feature extractor, which pads "
                "audio to 30 seconds. Only generate accepts longer audio"
            )
        gelu = nn.activation("gelu")
        x = gelu(self.conv2(gelu(self.conv1(ids.transpose(0, 2, 1)))))
        x = x + self.embed_positions(jnp.arange(x.shape[1])).astype(x.dtype)
        return self.dropout(x, rngs)

    def __call__(  # type: ignore[override]  # audio has neither masks nor segments
        self,
        features: jax.Array,  # (batch, mels, frames)
        **options: Any,
    ) -> out.FlaxModelOutput:
        return super().__call__(None, features, None, None, None, **options)


class Decoder(layers.Decoder):
    """The decoder with its token embeddings."""

    layer, positions = DecoderLayer, DecoderPositions
    embedding_norm, norm_first = False, True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=True)
        self.scale = 1.0  # as in PyTorch, scale_embedding is ignored


class WhisperModule(nnx.Module):
    """Encoder and decoder without a head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.encoder, self.decoder = Encoder(config, rngs), Decoder(config, rngs)

    @property
    def decoder_embedding(self) -> nn.Embed:
        """The token embeddings of the decoder, which a tied head also uses."""
        return self.decoder.embed_tokens  # type: ignore[return-value]  # not None: own_token_embedding=True

    def encode(
        self,
        input_features: jax.Array,  # (batch, mels, frames)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder without a mask, because padding is encoded as silence."""
        return self.encoder(
            input_features,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def decode(
        self,
        decoder_input_ids: jax.Array,  # (batch, target_length)
        encoder_hidden_states: jax.Array,  # (batch, length, hidden)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the decoder on the encoder's output."""
        return self.decoder(
            None,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states,
            None,
            decoder_position_ids,
            None,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def __call__(
        self,
        input_features: jax.Array,  # (batch, mels, frames)
        decoder_input_ids: jax.Array,  # (batch, target_length)
        decoder_attention_mask: jax.Array | None = None,  # (batch, target_length)
        decoder_position_ids: jax.Array | None = None,  # (batch, target_length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        options: dict[str, Any] = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        encoded = self.encode(input_features, **options)
        decoded = self.decode(
            decoder_input_ids,
            encoded.last_hidden_state,
            decoder_attention_mask,
            decoder_position_ids,
            **options,
        )
        return out.seq2seq_output(decoded, encoded)


class ConditionalGeneration(heads.ModelWithHead):
    """Encoder and decoder with a language modeling head."""

    module = WhisperModule  # type: ignore[assignment]  # not a BART module, but with its methods

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.lm_head = heads.untied_head(config, rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        return (self.model.decoder_embedding.attend if self.lm_head is None else self.lm_head)(x)

    @functools.wraps(WhisperModule.decode, assigned=())
    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Runs the decoder and the head."""
        decoded = self.model.decode(*args, **kwargs)
        logits = self.logits(decoded.last_hidden_state)
        return heads.head_output(out.FlaxCausalLMOutputWithCrossAttentions, decoded, logits=logits)

    @functools.wraps(WhisperModule.__call__, assigned=())
    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        output = self.model(*args, **kwargs)
        logits = self.logits(output.last_hidden_state)
        return heads.head_output(out.FlaxSeq2SeqLMOutput, output, logits=logits)


class AudioClassification(nnx.Module):
    """Audio classification, from the mean of the encoder's hidden states over positions.

    If `config.use_weighted_layer_sum` is set, the hidden states are a weighted mean over layers.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        width, init, count = config.d_model, nn.normal(config.init_std), config.encoder_layers + 1
        self.layer_weights = nnx.data(None)
        if config.use_weighted_layer_sum:
            self.layer_weights = nnx.Param(jnp.full(count, 1.0 / count))
        self.projector = nn.Linear(width, config.classifier_proj_size, init, rngs)
        labels = num_labels(config)  # None only before the configuration is complete
        self.classifier = nn.Linear(config.classifier_proj_size, labels, init, rngs)

    def __call__(
        self,
        input_features: jax.Array,  # (batch, mels, frames)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        layer_weights = self.layer_weights
        encoded = self.encoder(
            input_features,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states or layer_weights is not None,
        )
        x = encoded.last_hidden_state
        if layer_weights is not None:
            weights = jax.nn.softmax(layer_weights[...])
            layer_outputs = cast("tuple[jax.Array, ...]", encoded.hidden_states)  # requested above
            mean: Any = sum(w * output for w, output in zip(weights, layer_outputs, strict=True))
            x = mean.astype(x.dtype)
        logits = self.classifier(self.projector(x).mean(1))
        states = encoded.hidden_states if output_hidden_states else None
        return out.FlaxSequenceClassifierOutput(logits, states, encoded.attentions)


class FlaxWhisperPreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base class of the Whisper models: configuration, checkpoint names and call signatures."""

    config_class = WhisperConfig
    base_model_prefix = "model"
    main_input_name = "input_features"
    position_table = "max_target_positions"
    weight_aliases = {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    weight_templates = {"lm_head": "proj_out"}

    def _example_shape(self) -> tuple[int, int, int]:
        return (1, self.config.num_mel_bins, 2 * self.config.max_source_positions)

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_features: Input,
        decoder_input_ids: Input = None,
        attention_mask: Input = None,
        decoder_attention_mask: Input = None,
        position_ids: Input = None,
        decoder_position_ids: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs encoder and decoder. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_features: Spectrograms, `(batch, mels, frames)`.
            decoder_input_ids: Target tokens, `(batch, length)`.
            attention_mask: Ignored, because the padding of audio is not masked.
            decoder_attention_mask: Mask of the target, `(batch, length)`, 0 for padding.
            position_ids: Ignored.
            decoder_position_ids: Position IDs of the target, `(batch, length)`.
        """
        return super().__call__(
            input_features,
            None,
            decoder_input_ids,
            decoder_attention_mask,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            decoder_position_ids=decoder_position_ids,
            **inputs,
        )

    def encode(  # type: ignore[override]  # as in Transformers 4
        self,
        input_features: Input,
        attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder on spectrograms, `(batch, mels, frames)`."""
        return super().encode(
            input_features,
            None,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            **inputs,
        )

    def decode(  # type: ignore[override]  # as in Transformers 4
        self,
        decoder_input_ids: Input,
        encoder_outputs: EncoderOutputs,
        encoder_attention_mask: Input = None,
        decoder_attention_mask: Input = None,
        decoder_position_ids: Input = None,
        past_key_values: trees.Params | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the decoder. See :meth:`FlaxSeq2SeqPreTrainedModel.decode`."""
        return super().decode(
            decoder_input_ids,
            encoder_outputs,
            None,
            decoder_attention_mask,
            past_key_values,
            output_attentions,
            output_hidden_states,
            return_dict,
            train,
            params,
            dropout_rng,
            decoder_position_ids=decoder_position_ids,
            **inputs,
        )

    def encoder_mask(self, attention_mask: Input, encoder_outputs: EncoderOutputs) -> None:
        """Returns `None`, because the decoder attends to all positions of the encoder."""
        return None


class FlaxWhisperModel(FlaxWhisperPreTrainedModel):
    """Whisper without a head. Returns the hidden states of decoder and encoder."""

    module_class = WhisperModule
    weight_aliases = {}


class FlaxWhisperForConditionalGeneration(
    WhisperGeneration, Seq2SeqGeneration, FlaxWhisperPreTrainedModel
):
    """Whisper with a language modeling head, for transcription and translation of speech."""

    module_class = ConditionalGeneration


class FlaxWhisperForAudioClassification(FlaxWhisperPreTrainedModel):
    """Whisper's encoder for audio classification."""

    module_class = AudioClassification
    weight_aliases = {}

    def __call__(  # type: ignore[override]  # as in Transformers 4
        self,
        input_features: Input,
        attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_features: Spectrograms, `(batch, mels, frames)`.
            attention_mask: Ignored, because the padding of audio is not masked.
        """
        return self.run(
            {"input_features": input_features, **inputs},
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )
