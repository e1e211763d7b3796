"""mBART (Liu et al., 2020): BART with norms before each block, for many languages.

A row ends with the id of its language; shifted right, it begins with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from transformers import MBartConfig

from hfseq.errors import UsageError
from hfseq.modeling import Seq2SeqGeneration
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.pegasus.modeling import DecoderLayer, EncoderLayer


def shift_tokens_right(input_ids: jax.Array | np.ndarray, pad_token_id: int | None) -> jax.Array:
    """Make decoder inputs of labels: each row's last token that is no padding comes first.

    ``input_ids`` is (batch, length), where -100 is read as padding; returns int32 of that shape.
    """
    if pad_token_id is None:
        raise UsageError("shifting ids to the right needs a pad_token_id in the configuration")
    ids = jnp.asarray(input_ids, jnp.int32)
    ids = jnp.where(ids == -100, pad_token_id, ids)
    last = (ids != pad_token_id).sum(-1, keepdims=True) - 1
    return jnp.concatenate([jnp.take_along_axis(ids, last, axis=1), ids[:, :-1]], axis=1)


class Encoder(layers.Encoder):
    """The encoder, its embeddings normalised, and once more what it returns."""

    layer, norm_first = EncoderLayer, True


class Decoder(layers.Decoder):
    """The decoder, its embeddings normalised, and once more what it returns."""

    layer, norm_first = DecoderLayer, True


class MBartModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token."""

    module = MBartModule


class SequenceClassification(heads.SequenceClassification):
    """A label (or a number) for the whole sequence, read where the decoder sees its last <eos>."""

    module = MBartModule


class QuestionAnswering(heads.QuestionAnswering):
    """The first and the last token of the answer."""

    module = MBartModule


class FlaxMBartPreTrainedModel(FlaxBartPreTrainedModel):
    """Base of the mBART classes."""

    config_class = MBartConfig

    def default_decoder_input_ids(self, input_ids: jax.Array) -> jax.Array:
        """Return ``input_ids`` shifted right, the id of the language in front."""
        return shift_tokens_right(input_ids, self.config.pad_token_id)


class FlaxMBartModel(FlaxMBartPreTrainedModel):
    """mBART without a head: hidden states of decoder and encoder."""

    module_class = MBartModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxMBartForConditionalGeneration(Seq2SeqGeneration, FlaxMBartPreTrainedModel):
    """mBART with its language-modelling head: denoising, translation."""

    module_class = ConditionalGeneration


class FlaxMBartForSequenceClassification(FlaxMBartPreTrainedModel):
    """mBART with a classifier on the decoder's last ``<eos>``."""

    module_class = SequenceClassification


class FlaxMBartForQuestionAnswering(FlaxMBartPreTrainedModel):
    """mBART that marks the span of an answer."""

    module_class = QuestionAnswering
