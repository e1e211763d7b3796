"""HuBERT (Hsu et al., 2021) on Flax NNX: wav2vec 2.0 without a quantizer and without adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import HubertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels
from hfseq_plugins.wav2vec2 import modeling as wav2vec2
from hfseq_plugins.wav2vec2.modeling import FlaxWav2Vec2PreTrainedModel, dense, frame_mask
from hfseq_plugins.wav2vec2.sharding import RULES as WAV2VEC2

RULES = [
    (r"(projector|classifier)/kernel$", "row_table"),
    (r"(projector|classifier)/bias$|layer_weights$", "replicated"),
    *WAV2VEC2,
]


class FeatureProjection(wav2vec2.FeatureProjection):
    """Norm, projection and dropout. The projection has the initialization of all linear layers."""

    @staticmethod
    def make_projection(config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Linear:
        """Returns the projection."""
        return dense(config, config.conv_dim[-1], config.hidden_size, rngs)


class Hubert(wav2vec2.Wav2Vec2):
    """Feature encoder and Transformer, without a head."""

    projection_class = FeatureProjection

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the base class. The output omits the extracted features."""
        output = super().__call__(*args, **kwargs)
        return out.FlaxBaseModelOutput(
            output.last_hidden_state, output.hidden_states, output.attentions
        )


class CTC(wav2vec2.CTC):
    """The encoder with a CTC head, which computes logits of the vocabulary for each frame."""

    model_class, model_name = Hubert, "hubert"


class AudioHead(nnx.Module):
    """Base class of classification heads.

    If `config.use_weighted_layer_sum` is set, the input of the head is a weighted mean of the
    hidden states of all layers. Otherwise, it is the output of the last layer.

    Attributes:
        model_class: Class of the encoder.
        model_name: Name of the encoder in checkpoints.
    """

    model_class: ClassVar[Callable[..., Any]] = Hubert
    model_name: ClassVar[str] = "hubert"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        if getattr(config, "add_adapter", False):
            raise UsageError(
                "add_adapter=True in the configuration is not supported for audio classification: "
                "set it to False"
            )
        setattr(self, self.model_name, self.model_class(config, rngs))
        self.config, count = config, config.num_hidden_layers + 1
        self.layer_weights = nnx.data(None)
        if config.use_weighted_layer_sum:
            self.layer_weights = nnx.Param(jnp.full(count, 1.0 / count))

    def encode(
        self,
        input_values: jax.Array,  # (batch, samples)
        attention_mask: jax.Array | None,  # (batch, samples)
        output_hidden_states: bool,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns hidden states, `(batch, frames, hidden)`, and other outputs of the encoder."""
        layer_weights = self.layer_weights
        encoded = getattr(self, self.model_name)(
            input_values,
            attention_mask,
            output_hidden_states=output_hidden_states or layer_weights is not None,
            **options,
        )
        x = encoded.last_hidden_state
        if layer_weights is not None:
            weights = jax.nn.softmax(layer_weights[...])
            states = zip(weights, encoded.hidden_states, strict=True)
            x = sum(weight * state for weight, state in states).astype(x.dtype)
        return x, {
            "hidden_states": encoded.hidden_states if output_hidden_states else None,
            "attentions": encoded.attentions,
        }


class SequenceClassification(AudioHead):
    """Audio classification, from the mean of all frames that are not padding."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        inner = config.classifier_proj_size
        self.projector = dense(config, config.hidden_size, inner, rngs)
        self.classifier = dense(config, inner, num_labels(config), rngs)

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
        x = self.projector(x)
        mask = jnp.ones(x.shape[:2], jnp.int32)
        if attention_mask is not None:
            mask = frame_mask(self.config, x.shape[1], attention_mask)
        weights = mask[..., None].astype(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1)
        return out.FlaxSequenceClassifierOutput(self.classifier(pooled), **outputs)


class FlaxHubertPreTrainedModel(FlaxWav2Vec2PreTrainedModel):
    """Base class of the HuBERT models: configuration and checkpoint names."""

    config_class = HubertConfig
    base_model_prefix = "hubert"


class FlaxHubertModel(FlaxHubertPreTrainedModel):
    """HuBERT without a head. Returns hidden states."""

    module_class = Hubert


class FlaxHubertForCTC(FlaxHubertPreTrainedModel):
    """HuBERT with a CTC head, for speech recognition."""

    module_class = CTC


class FlaxHubertForSequenceClassification(FlaxHubertPreTrainedModel):
    """HuBERT for audio classification."""

    module_class = SequenceClassification
