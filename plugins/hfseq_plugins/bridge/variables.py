"""Modules and variable types of bridged models, with and without PyTorch."""

from __future__ import annotations

from flax import nnx


class BridgeBuffer(nnx.Variable):
    """A tensor that PyTorch's model stores in checkpoints but does not train.

    Running statistics of batch normalization are `nnx.BatchStat` instead.
    """


nnx.register_variable_name("buffers", BridgeBuffer)


class Holder(nnx.Module):
    """Holds the parameters and submodules of a PyTorch module that has no hfseq counterpart."""
