"""Marian (Junczys-Dowmunt et al., 2018, https://arxiv.org/abs/1804.00344): the opus-mt models."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.marian.modeling"


@hookimpl
def register_architectures(register):
    """Add Marian with the heads that Transformers 4 had in Flax."""
    register(
        "marian",
        config="transformers:MarianConfig",
        heads={
            "Model": f"{MODELING}:FlaxMarianModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxMarianMTModel",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
    )
