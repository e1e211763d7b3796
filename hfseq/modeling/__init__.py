"""A model from outside: called with its parameters, loaded, saved, chosen by name."""

from hfseq.checkpoints.weights import Derived, Tensor, WeightMap
from hfseq.modeling.base import FlaxPreTrainedModel
from hfseq.modeling.seq2seq import (
    FlaxSeq2SeqPreTrainedModel,
    Seq2SeqGeneration,
    shift_tokens_right,
)

__all__ = [
    "Derived",
    "FlaxPreTrainedModel",
    "FlaxSeq2SeqPreTrainedModel",
    "Seq2SeqGeneration",
    "Tensor",
    "WeightMap",
    "shift_tokens_right",
]
