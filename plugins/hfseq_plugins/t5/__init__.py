"""T5 and T5 v1.1 (Raffel et al., 2020, https://arxiv.org/abs/1910.10683)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.t5.modeling"


@hookimpl
def register_architectures(register):
    """Add T5 with the heads that Transformers 4 had in Flax."""
    register(
        "t5",
        config="transformers:T5Config",
        heads={
            "Model": f"{MODELING}:FlaxT5Model",
            "ForPreTraining": f"{MODELING}:FlaxT5ForConditionalGeneration",
            "ForSeq2SeqLM": f"{MODELING}:FlaxT5ForConditionalGeneration",
        },
        sharding="hfseq_plugins.t5.sharding:RULES",
    )
