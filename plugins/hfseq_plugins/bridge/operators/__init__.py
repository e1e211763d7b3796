"""Functions of jax arrays that compute PyTorch's operators."""

from __future__ import annotations

from hfseq_plugins.bridge.operators import (  # noqa: F401  # each module fills the table
    elementwise,
    indexing,
    layers,
    linear_algebra,
    recurrent,
    reductions,
    shapes,
)
from hfseq_plugins.bridge.operators.table import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]
