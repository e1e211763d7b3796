"""PEGASUS (Zhang et al., 2019): BART with norms before each block and fixed places."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PegasusConfig

from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import (
    POSITION_TABLES,
    fixed_positions,
    has_custom_positions,
    sinusoids,
)


class EncoderLayer(layers.EncoderLayer):
    """BART's, with the norm in front of each block."""

    norm_first = True


class DecoderLayer(layers.DecoderLayer):
    """BART's, with the norm in front of each block."""

    norm_first = True


class Encoder(layers.Encoder):
    """The encoder, normalised once more at its end."""

    layer, positions = EncoderLayer, staticmethod(fixed_positions)
    embedding_norm, norm_first = False, True


class Decoder(layers.Decoder):
    """The decoder, normalised once more at its end."""

    layer, positions = DecoderLayer, staticmethod(fixed_positions)
    embedding_norm, norm_first = False, True


class PegasusModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token."""

    module = PegasusModule


class FixedPositions:
    """Sines and cosines for places: no parameters, as in v4, unless a checkpoint holds others."""

    ignored_weights = (*FlaxBartPreTrainedModel.ignored_weights, POSITION_TABLES)

    def __init__(
        self: FlaxBartPreTrainedModel,
        config: PegasusConfig,
        *args: Any,
        stored_positions: bool = False,
        **kwargs: Any,
    ):
        if stored_positions and getattr(config, "static_position_embeddings", True):
            config = copy.deepcopy(config)
            config.static_position_embeddings = False
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    @classmethod
    def checkpoint_options(cls, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Take the places of the file for parameters where they are not the computed ones."""
        return {"stored_positions": True} if has_custom_positions(tensors) else {}

    def position_tables(self: FlaxBartPreTrainedModel, prefix: str) -> dict[str, DerivedTensor]:
        """Return the tables by PyTorch's names, if the model computes them."""
        config = self.config
        if not getattr(config, "static_position_embeddings", True):
            return {}
        table = DerivedTensor(sinusoids(config.max_position_embeddings, config.d_model))
        return {f"{prefix}{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


class FlaxPegasusPreTrainedModel(FixedPositions, FlaxBartPreTrainedModel):
    """Base of the PEGASUS classes."""

    config_class = PegasusConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return the tables of places, which PyTorch keeps in its checkpoints."""
        return self.position_tables("" if self.module_class is PegasusModule else "model.")


class FlaxPegasusModel(FlaxPegasusPreTrainedModel):
    """PEGASUS without a head: hidden states of decoder and encoder."""

    module_class = PegasusModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxPegasusForConditionalGeneration(Seq2SeqGeneration, FlaxPegasusPreTrainedModel):
    """PEGASUS with its language-modelling head: summaries, translation."""

    module_class = ConditionalGeneration
