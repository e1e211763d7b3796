"""Blenderbot Small (Roller et al., 2021): BART without unused position embeddings.

The decoder does not scale the token embeddings. It normalizes them before it adds the position
embeddings.
"""

from __future__ import annotations

from flax import nnx
from transformers import BlenderbotSmallConfig

from hfseq.modeling import Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import UnshiftedPositions


class Encoder(layers.Encoder):
    """Blenderbot Small encoder."""

    positions = UnshiftedPositions


class Decoder(layers.Decoder):
    """Blenderbot Small decoder."""

    positions, norm_after_positions = UnshiftedPositions, False

    def __init__(self, config: BlenderbotSmallConfig, rngs: nnx.Rngs, own_token_embedding: bool):
        super().__init__(config, rngs, own_token_embedding)
        self.scale = 1.0  # As in PyTorch, `scale_embedding` only affects the encoder.


class BlenderbotSmallModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head."""

    module = BlenderbotSmallModule


class FlaxBlenderbotSmallPreTrainedModel(FlaxBartPreTrainedModel):
    """Base class of the Blenderbot Small models."""

    config_class = BlenderbotSmallConfig


class FlaxBlenderbotSmallModel(FlaxBlenderbotSmallPreTrainedModel):
    """Blenderbot Small without a head. Returns decoder and encoder hidden states."""

    module_class = BlenderbotSmallModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxBlenderbotSmallForConditionalGeneration(
    Seq2SeqGeneration, FlaxBlenderbotSmallPreTrainedModel
):
    """Blenderbot Small with a language modeling head, which generates the next utterance."""

    module_class = ConditionalGeneration
