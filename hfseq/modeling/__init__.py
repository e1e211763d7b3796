"""Model base classes, loading and saving, adapters, and the Auto classes.

The names of this package are imported when they are first used. So importing `hfseq.modeling.auto`,
whose mappings do not need jax, does not import the model classes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hfseq.plugins.import_hooks import prepare_jax

if TYPE_CHECKING:
    from hfseq.checkpoints.weights import DerivedTensor as DerivedTensor
    from hfseq.checkpoints.weights import JoinedTensor as JoinedTensor
    from hfseq.checkpoints.weights import Tensor as Tensor
    from hfseq.checkpoints.weights import WeightMap as WeightMap
    from hfseq.modeling.composite import (
        FlaxCompositePreTrainedModel as FlaxCompositePreTrainedModel,
    )
    from hfseq.modeling.pretrained import FlaxPreTrainedModel as FlaxPreTrainedModel
    from hfseq.modeling.pretrained import FlaxVisionPreTrainedModel as FlaxVisionPreTrainedModel
    from hfseq.modeling.seq2seq import FlaxSeq2SeqPreTrainedModel as FlaxSeq2SeqPreTrainedModel
    from hfseq.modeling.seq2seq import Seq2SeqGeneration as Seq2SeqGeneration
    from hfseq.modeling.seq2seq import shift_tokens_right as shift_tokens_right

_MODULES = {
    "DerivedTensor": "hfseq.checkpoints.weights",
    "FlaxCompositePreTrainedModel": "hfseq.modeling.composite",
    "FlaxPreTrainedModel": "hfseq.modeling.pretrained",
    "FlaxSeq2SeqPreTrainedModel": "hfseq.modeling.seq2seq",
    "FlaxVisionPreTrainedModel": "hfseq.modeling.pretrained",
    "JoinedTensor": "hfseq.checkpoints.weights",
    "Seq2SeqGeneration": "hfseq.modeling.seq2seq",
    "Tensor": "hfseq.checkpoints.weights",
    "WeightMap": "hfseq.checkpoints.weights",
    "shift_tokens_right": "hfseq.modeling.seq2seq",
}

prepare_jax()  # before the first import of flax


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hfseq.modeling' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
