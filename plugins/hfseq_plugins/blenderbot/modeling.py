"""Blenderbot (Roller et al., 2021): BART with norms before each block and none of the embeddings.

The table of places has no rows that are kept free.
"""

from __future__ import annotations

from transformers import BlenderbotConfig

from hfseq.modeling import Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import UnshiftedPositions
from hfseq_plugins.pegasus.modeling import DecoderLayer, EncoderLayer


class Encoder(layers.Encoder):
    """The encoder, normalised once more at its end."""

    layer, positions = EncoderLayer, UnshiftedPositions
    embedding_norm, norm_first = False, True


class Decoder(layers.Decoder):
    """The decoder, normalised once more at its end."""

    layer, positions = DecoderLayer, UnshiftedPositions
    embedding_norm, norm_first = False, True


class BlenderbotModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token."""

    module = BlenderbotModule


class FlaxBlenderbotPreTrainedModel(FlaxBartPreTrainedModel):
    """Base of the Blenderbot classes."""

    config_class = BlenderbotConfig


class FlaxBlenderbotModel(FlaxBlenderbotPreTrainedModel):
    """Blenderbot without a head: hidden states of decoder and encoder."""

    module_class = BlenderbotModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxBlenderbotForConditionalGeneration(Seq2SeqGeneration, FlaxBlenderbotPreTrainedModel):
    """Blenderbot with its language-modelling head: the next utterance."""

    module_class = ConditionalGeneration
