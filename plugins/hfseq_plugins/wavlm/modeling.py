"""WavLM (Chen et al., 2022) on Flax NNX: wav2vec 2.0 with gated relative position biases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig, WavLMConfig

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels
from hfseq_plugins.hubert import modeling as hubert
from hfseq_plugins.hubert.modeling import AudioHead
from hfseq_plugins.wav2vec2 import modeling as wav2vec2
from hfseq_plugins.wav2vec2.modeling import FlaxWav2Vec2PreTrainedModel, dense

RULES = [
    (r"rel_attn_embed/embedding$|gru_rel_pos_(linear/(kernel|bias)|const)$", "replicated"),
    *hubert.RULES,
]


class Attention(wav2vec2.Attention):
    """Self-attention with a relative position bias that is multiplied by gates.

    The attention of the first layer contains the embeddings of relative positions, from which the
    bias of all layers is computed.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, biased: bool):
        super().__init__(config, rngs)
        self.gru_rel_pos_const = nnx.Param(jnp.ones((1, self.heads, 1, 1)))
        self.gru_rel_pos_linear = dense(config, config.hidden_size // self.heads, 8, rngs)
        init = nn.normal(config.initializer_range)
        self.rel_attn_embed = (
            nn.Embed(config.num_buckets, self.heads, init, rngs) if biased else nnx.data(None)
        )

    def gate_bias(self, x: jax.Array, position_bias: jax.Array) -> jax.Array:
        """Scales the bias of each query and head (Chen et al., 2022, section 3.2).

        Args:
            x: Hidden states, `(batch, frames, hidden)`.
            position_bias: The relative position bias, `(1, heads, frames, frames)`.

        Returns:
            The scaled bias, `(batch, heads, frames, frames)`.
        """
        # All heads are computed in one product with a block-diagonal kernel. The simpler
        # `x.reshape(..., heads, -1)` gives wrong scores on a mesh with the axes data, fsdp and
        # tensor, because of an error in XLA (jax 0.10.2).
        linear = self.gru_rel_pos_linear
        kernel = jnp.kron(jnp.eye(self.heads), linear.kernel[...]).astype(x.dtype)
        gates = (x @ kernel).reshape(*x.shape[:2], self.heads, -1)
        bias = linear.bias[...].astype(x.dtype)  # type: ignore[index]  # the layer has a bias
        gates = (gates + bias).transpose(0, 2, 1, 3)
        update, reset = (
            jax.nn.sigmoid(part.sum(-1, keepdims=True)) for part in jnp.split(gates, 2, axis=-1)
        )
        constant = self.gru_rel_pos_const[...].astype(x.dtype)
        return (update * (reset * constant - 1) + 2) * position_bias.astype(x.dtype)


class Encoder(wav2vec2.Encoder):
    """Convolutional position embeddings and a stack of layers that share a position bias."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.max_distance = config.max_bucket_distance

    def make_layers(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Layers:
        """Returns the layers. Only the first one has position embeddings."""
        return nn.Layers(
            [
                wav2vec2.Layer(config, rngs, Attention(config, rngs, biased=number == 0))
                for number in range(config.num_hidden_layers)
            ],
            shared=("rel_attn_embed",),
        )

    def position_bias(self, frames: int) -> jax.Array:
        """Returns the bias of the attention scores of all layers, `(1, heads, frames, frames)`."""
        first = self.layers[0] if isinstance(self.layers, nnx.List) else self.layers
        table = first.attention.rel_attn_embed.embedding[...]
        return nn.relative_position_bias(
            table.reshape(table.shape[-2:]),  # scanned layers have a layer axis
            frames,
            frames,
            bidirectional=True,
            max_distance=self.max_distance,
        )


class WavLM(wav2vec2.Wav2Vec2):
    """Feature encoder, Transformer and optional adapter, without a head."""

    encoder_class = Encoder


class CTC(wav2vec2.CTC):
    """The encoder with a CTC head, which computes logits of the vocabulary for each frame."""

    model_class, model_name = WavLM, "wavlm"


class SequenceClassification(hubert.SequenceClassification):
    """Audio classification, from the mean of all frames that are not padding."""

    model_class, model_name = WavLM, "wavlm"


class FrameClassification(AudioHead):
    """Classification of each frame, for example for speaker diarization."""

    model_class, model_name = WavLM, "wavlm"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(
        self,
        input_values: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None = None,  # (batch, samples)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        freeze_feature_encoder: bool = False,
    ) -> out.FlaxModelOutput:
        x, outputs = self.encode(
            input_values,
            attention_mask,
            output_hidden_states,
            rngs=rngs,
            output_attentions=output_attentions,
            freeze_feature_encoder=freeze_feature_encoder,
        )
        return out.FlaxTokenClassifierOutput(self.classifier(x), **outputs)


class FlaxWavLMPreTrainedModel(FlaxWav2Vec2PreTrainedModel):
    """Base class of the WavLM models: configuration and checkpoint names."""

    config_class = WavLMConfig
    base_model_prefix = "wavlm"


class FlaxWavLMModel(FlaxWavLMPreTrainedModel):
    """WavLM without a head. Returns hidden states and extracted features."""

    module_class = WavLM


class FlaxWavLMForCTC(FlaxWavLMPreTrainedModel):
    """WavLM with a CTC head, for speech recognition."""

    module_class = CTC


class FlaxWavLMForSequenceClassification(FlaxWavLMPreTrainedModel):
    """WavLM for audio classification."""

    module_class = SequenceClassification


class FlaxWavLMForAudioFrameClassification(FlaxWavLMPreTrainedModel):
    """WavLM for the classification of each frame."""

    module_class = FrameClassification
