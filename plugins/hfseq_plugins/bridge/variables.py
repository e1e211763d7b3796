"""NNX modules that bridged models use with and without PyTorch."""

from __future__ import annotations

from flax import nnx


class Holder(nnx.Module):
    """Holds the parameters and submodules of a PyTorch module that no hfseq layer replaces."""

    #: As in `nnx.List`, submodules with a number as name are sorted by number: 2 precedes 10.
    _pytree__has_int_keys = True
