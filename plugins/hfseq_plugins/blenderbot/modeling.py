"""Blenderbot (Roller et al., 2021): pre-norm BART without a norm of the embeddings.

BART has two unused position embeddings at the start. Blenderbot has none.
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
    """Blenderbot encoder with a final norm."""

    layer, positions = EncoderLayer, UnshiftedPositions
    embedding_norm, norm_first = False, True


class Decoder(layers.Decoder):
    """Blenderbot decoder with a final norm."""

    layer, positions = DecoderLayer, UnshiftedPositions
    embedding_norm, norm_first = False, True


class BlenderbotModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head."""

    module = BlenderbotModule


class FlaxBlenderbotPreTrainedModel(FlaxBartPreTrainedModel):
    """Base class of the Blenderbot models."""

    config_class = BlenderbotConfig


class FlaxBlenderbotModel(FlaxBlenderbotPreTrainedModel):
    """Blenderbot without a head. Returns decoder and encoder hidden states."""

    module_class = BlenderbotModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxBlenderbotForConditionalGeneration(Seq2SeqGeneration, FlaxBlenderbotPreTrainedModel):
    """Blenderbot with a language modeling head, which generates the next utterance."""

    module_class = ConditionalGeneration
