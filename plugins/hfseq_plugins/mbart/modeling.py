"""mBART (Liu et al., 2020): multilingual BART with pre-norm layers.

Target sequences end with a language ID. When they are shifted right to make decoder inputs, the
language ID becomes the first token.
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
    """Shifts labels right. The last token that is not padding becomes the first token.

    Args:
        input_ids: Labels, `(batch, length)`. -100 is treated as padding.
        pad_token_id: ID of the padding token.

    Returns:
        Decoder inputs, int32, `(batch, length)`.

    Raises:
        UsageError: `pad_token_id` is `None`.
    """
    if pad_token_id is None:
        raise UsageError("shift_tokens_right requires a pad_token_id in the configuration")
    ids = jnp.asarray(input_ids, jnp.int32)
    ids = jnp.where(ids == -100, pad_token_id, ids)
    last_index = (ids != pad_token_id).sum(-1, keepdims=True) - 1
    return jnp.concatenate([jnp.take_along_axis(ids, last_index, axis=1), ids[:, :-1]], axis=1)


class Encoder(layers.Encoder):
    """mBART encoder with embedding norm and final norm."""

    layer, norm_first = EncoderLayer, True


class Decoder(layers.Decoder):
    """mBART decoder with embedding norm and final norm."""

    layer, norm_first = DecoderLayer, True


class MBartModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head."""

    module = MBartModule


class SequenceClassification(heads.SequenceClassification):
    """Sequence classification or regression, from the decoder state of the last `<eos>`."""

    module = MBartModule


class QuestionAnswering(heads.QuestionAnswering):
    """Encoder-decoder with a head for extractive question answering."""

    module = MBartModule


class FlaxMBartPreTrainedModel(FlaxBartPreTrainedModel):
    """Base class of the mBART models."""

    config_class = MBartConfig

    def default_decoder_input_ids(self, input_ids: jax.Array) -> jax.Array:  # type: ignore[override]  # called with arrays only
        """Returns `input_ids` shifted right, so that they start with the language ID."""
        return shift_tokens_right(input_ids, self.config.pad_token_id)


class FlaxMBartModel(FlaxMBartPreTrainedModel):
    """mBART without a head. Returns decoder and encoder hidden states."""

    module_class = MBartModule
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxMBartForConditionalGeneration(Seq2SeqGeneration, FlaxMBartPreTrainedModel):
    """mBART with a language modeling head, for denoising and translation."""

    module_class = ConditionalGeneration


class FlaxMBartForSequenceClassification(FlaxMBartPreTrainedModel):
    """mBART for sequence classification, from the decoder's last `<eos>`."""

    module_class = SequenceClassification


class FlaxMBartForQuestionAnswering(FlaxMBartPreTrainedModel):
    """mBART for extractive question answering."""

    module_class = QuestionAnswering
