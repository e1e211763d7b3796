"""Marian (Junczys-Dowmunt et al., 2018): BART without a norm of embeddings and with fixed places.

The two sides may have vocabularies of their own (``share_encoder_decoder_embeddings=False``).
"""

from __future__ import annotations

from flax import nnx
from transformers import MarianConfig

from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.layers import token_embedding
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import fixed_positions
from hfseq_plugins.pegasus.modeling import FixedPositions


def target_vocab_size(config: MarianConfig) -> int:
    """Return the number of tokens that the decoder reads and writes."""
    shared = config.share_encoder_decoder_embeddings
    return config.vocab_size if shared else config.decoder_vocab_size


class Encoder(layers.Encoder):
    """The encoder."""

    positions = staticmethod(fixed_positions)
    embedding_norm = False


class Decoder(layers.Decoder):
    """The decoder."""

    positions = staticmethod(fixed_positions)
    embedding_norm = False


class MarianModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)

    def __init__(self, config: MarianConfig, rngs: nnx.Rngs):
        shared = config.share_encoder_decoder_embeddings
        self.shared = token_embedding(config, rngs) if shared else nnx.data(None)
        own_tables = not (shared and config.tie_word_embeddings)
        self.add_stacks(config, rngs, own_tables, size=target_vocab_size(config))


class MTModel(heads.ConditionalGeneration):
    """The next target token."""

    module = MarianModule
    vocabulary = staticmethod(target_vocab_size)


class FlaxMarianPreTrainedModel(FixedPositions, FlaxBartPreTrainedModel):
    """Base of the Marian classes."""

    config_class = MarianConfig

    def vocab_size(self, name: str = "input_ids") -> int:
        """Return the number of tokens of a side."""
        return self.config.vocab_size if name == "input_ids" else target_vocab_size(self.config)


class FlaxMarianModel(FlaxMarianPreTrainedModel):
    """Marian without a head: hidden states of decoder and encoder."""

    module_class = MarianModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return the tables of places: without a head PyTorch's class keeps them."""
        return self.position_tables("")


class FlaxMarianMTModel(Seq2SeqGeneration, FlaxMarianPreTrainedModel):
    """Marian with its language-modelling head: translation."""

    module_class = MTModel
