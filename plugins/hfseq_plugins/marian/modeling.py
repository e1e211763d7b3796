"""Marian (Junczys-Dowmunt et al., 2018): BART with sinusoidal positions and no embedding norm.

With `share_encoder_decoder_embeddings=False`, encoder and decoder have separate vocabularies.
"""

from __future__ import annotations

from flax import nnx
from transformers import MarianConfig, PreTrainedConfig

from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.modeling import shift_tokens_right as shift_tokens_right
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.layers import token_embedding
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import fixed_positions
from hfseq_plugins.pegasus.modeling import FixedPositions


def target_vocab_size(config: PreTrainedConfig) -> int:
    """Returns the size of the decoder vocabulary."""
    shared = config.share_encoder_decoder_embeddings
    return config.vocab_size if shared else config.decoder_vocab_size


class Encoder(layers.Encoder):
    """Marian encoder."""

    positions = staticmethod(fixed_positions)
    embedding_norm = False


class Decoder(layers.Decoder):
    """Marian decoder."""

    positions = staticmethod(fixed_positions)
    embedding_norm = False


class MarianModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)

    def __init__(self, config: MarianConfig, rngs: nnx.Rngs):
        shared = config.share_encoder_decoder_embeddings
        self.shared = token_embedding(config, rngs) if shared else nnx.data(None)  # type: ignore[assignment]  # absent with separate vocabularies
        own_tables = not (shared and config.tie_word_embeddings)
        self.add_stacks(config, rngs, own_tables, size=target_vocab_size(config))


class MTModel(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head."""

    module = MarianModule
    vocabulary = staticmethod(target_vocab_size)


class FlaxMarianPreTrainedModel(FixedPositions, FlaxBartPreTrainedModel):
    """Base class of the Marian models."""

    config_class = MarianConfig

    def vocab_size(self, name: str = "input_ids") -> int:
        """Returns the vocabulary size of the encoder or the decoder."""
        return self.config.vocab_size if name == "input_ids" else target_vocab_size(self.config)


class FlaxMarianModel(FlaxMarianPreTrainedModel):
    """Marian without a head. Returns decoder and encoder hidden states."""

    module_class = MarianModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the position embeddings, which PyTorch stores for the model without a head."""
        return self.position_tables("")


class FlaxMarianMTModel(Seq2SeqGeneration, FlaxMarianPreTrainedModel):
    """Marian with a language modeling head, for translation."""

    module_class = MTModel
