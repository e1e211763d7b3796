"""Small Blenderbot (Roller et al., 2021): BART without rows of its table of places kept free.

The decoder normalises the vectors of tokens, which it does not scale, before it adds places.
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
    """The encoder."""

    positions = UnshiftedPositions


class Decoder(layers.Decoder):
    """The decoder."""

    positions, norm_after_positions = UnshiftedPositions, False

    def __init__(self, config: BlenderbotSmallConfig, rngs: nnx.Rngs, own_token_embedding: bool):
        super().__init__(config, rngs, own_token_embedding)
        self.scale = 1.0  # PyTorch leaves ``scale_embedding`` to the encoder.


class BlenderbotSmallModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token."""

    module = BlenderbotSmallModule


class FlaxBlenderbotSmallPreTrainedModel(FlaxBartPreTrainedModel):
    """Base of the small Blenderbot's classes."""

    config_class = BlenderbotSmallConfig


class FlaxBlenderbotSmallModel(FlaxBlenderbotSmallPreTrainedModel):
    """Small Blenderbot without a head: hidden states of decoder and encoder."""

    module_class = BlenderbotSmallModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxBlenderbotSmallForConditionalGeneration(
    Seq2SeqGeneration, FlaxBlenderbotSmallPreTrainedModel
):
    """Small Blenderbot with its language-modelling head: the next utterance."""

    module_class = ConditionalGeneration
