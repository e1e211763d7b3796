"""Text generation: greedy search, sampling and beam search in one compiled loop."""

from hfseq.generation import logits_process as _processors
from hfseq.generation.generate import CausalGeneration, FixedStateGeneration, FlaxGenerationMixin
from hfseq.generation.logits_process import *  # noqa: F403
from hfseq.generation.search import FlaxBeamSearchOutput, FlaxGreedySearchOutput, FlaxSampleOutput

__all__ = [
    "CausalGeneration",
    "FixedStateGeneration",
    "FlaxBeamSearchOutput",
    "FlaxGenerationMixin",
    "FlaxGreedySearchOutput",
    "FlaxSampleOutput",
]
__all__ += _processors.__all__
