"""NNX modules that bridged models use with and without PyTorch."""

from __future__ import annotations

from flax import nnx


class Holder(nnx.Module):
    """Holds the parameters and submodules of a PyTorch module that no hfseq layer replaces."""
