"""Modules of bridged models, with and without PyTorch."""

from __future__ import annotations

from flax import nnx


class Holder(nnx.Module):
    """A module of PyTorch that has no counterpart in hfseq, with its parameters and submodules."""
