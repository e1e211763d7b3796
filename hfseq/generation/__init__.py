"""Text generation: greedy search, sampling and beam search in one compiled loop."""

from hfseq._compat import prepare_jax

prepare_jax()

from hfseq.generation import processors as _processors  # noqa: E402
from hfseq.generation.mixin import (  # noqa: E402
    CausalGeneration,
    FixedStateGeneration,
    FlaxGenerationMixin,
)
from hfseq.generation.outputs import (  # noqa: E402
    FlaxBeamSearchOutput,
    FlaxGreedySearchOutput,
    FlaxSampleOutput,
)
from hfseq.generation.processors import *  # noqa: E402, F403

__all__ = [
    "CausalGeneration",
    "FixedStateGeneration",
    "FlaxBeamSearchOutput",
    "FlaxGenerationMixin",
    "FlaxGreedySearchOutput",
    "FlaxSampleOutput",
]
__all__ += _processors.__all__
