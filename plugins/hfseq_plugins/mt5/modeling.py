"""mT5 (Xue et al., 2021): T5 v1.1 that was trained on a hundred languages."""

from __future__ import annotations

import copy

from transformers import MT5Config

from hfseq_plugins.t5 import modeling as t5
from hfseq_plugins.t5.modeling import shift_tokens_right


class FlaxMT5Model(t5.FlaxT5Model):
    """mT5 without a head. Returns the hidden states of decoder and encoder."""

    config_class = MT5Config


class FlaxMT5ForConditionalGeneration(t5.FlaxT5ForConditionalGeneration):
    """mT5 with a language modeling head."""

    config_class = MT5Config

    def stored_config(self) -> MT5Config:
        """Returns the configuration with `tie_word_embeddings=False`, as in published checkpoints.

        In Transformers 5, the option is always true and has no effect in mT5. If it were saved as
        true, Transformers 4 would use the token embeddings as the head and scale the head's input.
        """
        config = copy.deepcopy(super().stored_config())
        config.tie_word_embeddings = False
        return config


class FlaxMT5EncoderModel(t5.FlaxT5EncoderModel):
    """The encoder of mT5."""

    config_class = MT5Config


__all__ = [
    "FlaxMT5EncoderModel",
    "FlaxMT5ForConditionalGeneration",
    "FlaxMT5Model",
    "shift_tokens_right",
]
