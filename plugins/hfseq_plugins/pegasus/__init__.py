"""PEGASUS (Zhang et al., 2019, https://arxiv.org/abs/1912.08777)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.pegasus.modeling"


@hookimpl
def register_architectures(register):
    """Add PEGASUS with the heads that Transformers 4 had in Flax."""
    register(
        "pegasus",
        config="transformers:PegasusConfig",
        heads={
            "Model": f"{MODELING}:FlaxPegasusModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxPegasusForConditionalGeneration",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
    )
