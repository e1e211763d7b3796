"""Whisper (Radford et al., 2022): BART with norms before each block, whose encoder hears.

Attribute names are the checkpoint's. The encoder reads spectrograms of thirty seconds, always.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from transformers import WhisperConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxSeq2SeqPreTrainedModel, Seq2SeqGeneration
from hfseq.nn import outputs as out
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.whisper.generation import WhisperGeneration
from hfseq_plugins.xglm.modeling import sinusoids


class Attention(layers.Attention):
    """BART's, whose keys have no bias: it would change nothing."""

    def __init__(self, config: WhisperConfig, heads: int, rngs: nnx.Rngs, **kind: bool):
        super().__init__(config, heads, rngs, **kind)
        width, init = config.d_model, nn.normal(config.init_std)
        self.k_proj = nn.Linear(width, width, init, rngs, use_bias=False)


class EncoderLayer(layers.EncoderLayer):
    """Self-attention and feed-forward, each behind a norm."""

    norm_first, attention = True, Attention


class DecoderLayer(layers.DecoderLayer):
    """Self-attention, attention to the encoder's output, feed-forward, each behind a norm."""

    norm_first, attention = True, Attention


def sinusoidal_embedding_init(
    key: jax.Array | None, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Return sines and cosines, (length, width), under the name of Transformers 4; draw nothing."""
    return jnp.asarray(sinusoids(*shape, None), dtype)


class EncoderPositions(nn.Embed):
    """Sines and cosines that a checkpoint holds, never trained."""

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        size = (config.max_source_positions, config.d_model)
        super().__init__(*size, sinusoidal_embedding_init, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the vectors of places 0, 1, 2 …: (...) to (..., features)."""
        return jax.lax.stop_gradient(super().__call__(ids))


class DecoderPositions(nn.Embed):
    """Learned vectors of places, none of which is kept free."""

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        size = (config.max_target_positions, config.d_model)
        super().__init__(*size, nn.normal(config.init_std), rngs)


class Encoder(layers.Encoder):
    """Two convolutions, the second of which halves the length, and a stack of layers."""

    layer, positions = EncoderLayer, EncoderPositions
    embedding_norm, norm_first = False, True

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=False)
        width, init = config.d_model, nn.normal(config.init_std)
        self.conv1 = nn.Conv(config.num_mel_bins, width, (3,), init, rngs, padding=1)
        self.conv2 = nn.Conv(width, width, (3,), init, rngs, stride=2, padding=1)
        self.shape = (config.num_mel_bins, 2 * config.max_source_positions)

    def embed(self, shared, features, positions, segments, rngs):
        """Map spectrograms (batch, mels, frames) to (batch, frames / 2, features)."""
        if features.shape[1:] != self.shape:
            bands, frames = self.shape
            raise UsageError(
                f"input_features have shape {features.shape}; this model takes (batch, {bands}, "
                f"{frames}): make them with the checkpoint's feature extractor, which fills sound "
                "up to 30 seconds (generate takes longer ones, too)"
            )
        gelu = nn.activation("gelu")
        x = gelu(self.conv2(gelu(self.conv1(features.transpose(0, 2, 1)))))
        x = x + self.embed_positions(jnp.arange(x.shape[1])).astype(x.dtype)
        return self.dropout(x, rngs)

    def __call__(self, features: jax.Array, **options: Any):  # type: ignore[override]
        return super().__call__(None, features, None, None, None, **options)


class Decoder(layers.Decoder):
    """The decoder."""

    layer, positions = DecoderLayer, DecoderPositions
    embedding_norm, norm_first = False, True

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own_token_embedding=True)
        self.scale = 1.0  # whatever scale_embedding says, as in PyTorch


class WhisperModule(nnx.Module):
    """Encoder and decoder without a head."""

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        self.encoder, self.decoder = Encoder(config, rngs), Decoder(config, rngs)

    @property
    def decoder_embedding(self) -> nn.Embed:
        """The table that the decoder reads, and a tied head multiplies with."""
        return self.decoder.embed_tokens

    def encode(
        self, input_features, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        """Run the encoder, which hears silence too: there is no mask."""
        return self.encoder(
            input_features,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def decode(
        self,
        decoder_input_ids,
        encoder_hidden_states,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the decoder on the encoder's output."""
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
        input_features,
        decoder_input_ids,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        options = {
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
        return heads.seq2seq_output(decoded, encoded)


class ConditionalGeneration(heads.ModelWithHead):
    """The next token of what is said."""

    module = WhisperModule

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.lm_head = heads.untied_head(config, rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map hidden states to logits over the vocabulary."""
        return (self.model.decoder_embedding.attend if self.lm_head is None else self.lm_head)(x)

    @functools.wraps(WhisperModule.decode, assigned=())
    def decode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Run the decoder and the head."""
        decoded = self.model.decode(*args, **kwargs)
        logits = self.logits(decoded.last_hidden_state)
        return heads.head_output(out.FlaxCausalLMOutputWithCrossAttentions, decoded, logits=logits)

    @functools.wraps(WhisperModule.__call__, assigned=())
    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        logits = self.logits(output.last_hidden_state)
        return heads.head_output(out.FlaxSeq2SeqLMOutput, output, logits=logits)


class AudioClassification(nnx.Module):
    """A label for the sound, from the mean of its places, in all layers if wanted."""

    def __init__(self, config: WhisperConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        width, init, count = config.d_model, nn.normal(config.init_std), config.encoder_layers + 1
        self.layer_weights = nnx.data(None)
        if config.use_weighted_layer_sum:
            self.layer_weights = nnx.Param(jnp.full(count, 1.0 / count))
        self.projector = nn.Linear(width, config.classifier_proj_size, init, rngs)
        self.classifier = nn.Linear(config.classifier_proj_size, config.num_labels, init, rngs)

    def __call__(
        self, input_features, *, rngs=None, output_attentions=False, output_hidden_states=False
    ):
        weighted = self.layer_weights is not None
        encoded = self.encoder(
            input_features,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states or weighted,
        )
        x = encoded.last_hidden_state
        if weighted:
            parts = jax.nn.softmax(self.layer_weights[...])
            x = sum(part * state for part, state in zip(parts, encoded.hidden_states, strict=True))
            x = x.astype(encoded.last_hidden_state.dtype)
        logits = self.classifier(self.projector(x).mean(1))
        states = encoded.hidden_states if output_hidden_states else None
        return out.FlaxSequenceClassifierOutput(logits, states, encoded.attentions)


class FlaxWhisperPreTrainedModel(FlaxSeq2SeqPreTrainedModel):
    """Base of the Whisper classes: configuration, checkpoint names, the calls of Transformers 4."""

    config_class = WhisperConfig
    base_model_prefix = "model"
    main_input_name = "input_features"
    position_table = "max_target_positions"
    weight_aliases = {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    weight_templates = {"lm_head": "proj_out"}

    def _example_shape(self) -> tuple[int, int, int]:
        return (1, self.config.num_mel_bins, 2 * self.config.max_source_positions)

    def __call__(
        self,
        input_features,
        decoder_input_ids=None,
        attention_mask=None,
        decoder_attention_mask=None,
        position_ids=None,
        decoder_position_ids=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``input_features`` (batch, mels, frames), ``decoder_input_ids`` (batch, length). Sound has
        no padding that is hidden: ``attention_mask`` and ``position_ids`` change nothing.
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

    def encode(
        self,
        input_features,
        attention_mask=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run the encoder alone: (batch, mels, frames) to hidden states."""
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

    def decode(
        self,
        decoder_input_ids,
        encoder_outputs,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        **inputs,
    ):
        """Run the decoder; see :meth:`FlaxSeq2SeqPreTrainedModel.decode`."""
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

    def encoder_mask(self, attention_mask, encoder_outputs):
        """Return none: the decoder sees all of the sound."""
        return None


class FlaxWhisperModel(FlaxWhisperPreTrainedModel):
    """Whisper without a head: hidden states of decoder and encoder."""

    module_class = WhisperModule
    weight_aliases = {}


class FlaxWhisperForConditionalGeneration(
    WhisperGeneration, Seq2SeqGeneration, FlaxWhisperPreTrainedModel
):
    """Whisper with its language-modelling head: transcription and translation of speech."""

    module_class = ConditionalGeneration


class FlaxWhisperForAudioClassification(FlaxWhisperPreTrainedModel):
    """Whisper's encoder with a classifier of sound."""

    module_class = AudioClassification
    weight_aliases = {}

    def __call__(  # type: ignore[override]
        self,
        input_features,
        attention_mask=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        train=False,
        params=None,
        dropout_rng=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`."""
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
