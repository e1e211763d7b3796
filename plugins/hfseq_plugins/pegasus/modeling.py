"""PEGASUS (Zhang et al., 2019): pre-norm BART with sinusoidal positions."""

from __future__ import annotations

from transformers import PegasusConfig

from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import (
    POSITION_TABLES,
    StoredPositions,
    fixed_positions,
    sinusoids,
)


class EncoderLayer(layers.EncoderLayer):
    """Pre-norm BART encoder layer."""

    norm_first = True


class DecoderLayer(layers.DecoderLayer):
    """Pre-norm BART decoder layer."""

    norm_first = True


class Encoder(layers.Encoder):
    """PEGASUS encoder with a final norm."""

    layer, positions = EncoderLayer, staticmethod(fixed_positions)
    embedding_norm, norm_first = False, True


class Decoder(layers.Decoder):
    """PEGASUS decoder with a final norm."""

    layer, positions = DecoderLayer, staticmethod(fixed_positions)
    embedding_norm, norm_first = False, True


class PegasusModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head."""

    module = PegasusModule


class FixedPositions(StoredPositions, FlaxBartPreTrainedModel):
    """Mixin for models whose sinusoidal position embeddings are not parameters.

    Transformers 4 treats them in the same way.
    """

    ignored_weights = (*FlaxBartPreTrainedModel.ignored_weights, POSITION_TABLES)

    def position_tables(self, prefix: str) -> dict[str, DerivedTensor]:
        """Returns the computed position embeddings by their PyTorch names.

        Args:
            prefix: Prefix of the names, `model.` or empty.
        """
        config = self.config
        if not getattr(config, "static_position_embeddings", True):
            return {}
        table = DerivedTensor(sinusoids(config.max_position_embeddings, config.d_model))
        return {f"{prefix}{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


class FlaxPegasusPreTrainedModel(FixedPositions, FlaxBartPreTrainedModel):
    """Base class of the PEGASUS models."""

    config_class = PegasusConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the position embeddings, which PyTorch checkpoints contain."""
        return self.position_tables("" if self.module_class is PegasusModule else "model.")


class FlaxPegasusModel(FlaxPegasusPreTrainedModel):
    """PEGASUS without a head. Returns decoder and encoder hidden states."""

    module_class = PegasusModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxPegasusForConditionalGeneration(Seq2SeqGeneration, FlaxPegasusPreTrainedModel):
    """PEGASUS with a language modeling head, for summarization and translation."""

    module_class = ConditionalGeneration
