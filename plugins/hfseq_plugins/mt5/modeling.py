"""mT5 (Xue et al., 2021): T5 v1.1 for a hundred languages."""

from __future__ import annotations

import copy

from transformers import MT5Config

from hfseq_plugins.t5 import modeling as t5
from hfseq_plugins.t5.modeling import shift_tokens_right


class FlaxMT5Model(t5.FlaxT5Model):
    """mT5 without a head: hidden states of decoder and encoder."""

    config_class = MT5Config


class FlaxMT5ForConditionalGeneration(t5.FlaxT5ForConditionalGeneration):
    """mT5 with its language-modelling head."""

    config_class = MT5Config

    def stored_config(self) -> MT5Config:
        """Return a configuration that says that the head is not tied, as published ones do.

        The class of Transformers 5 ignores it, and says that it is; Transformers 4 would believe
        that, take the word vectors for the head, and scale what goes into it.
        """
        config = copy.deepcopy(super().stored_config())
        config.tie_word_embeddings = False
        return config


class FlaxMT5EncoderModel(t5.FlaxT5EncoderModel):
    """The encoder of mT5 alone."""

    config_class = MT5Config


__all__ = [
    "FlaxMT5EncoderModel",
    "FlaxMT5ForConditionalGeneration",
    "FlaxMT5Model",
    "shift_tokens_right",
]
