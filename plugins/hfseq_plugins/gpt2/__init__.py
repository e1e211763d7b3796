"""GPT-2 (Radford et al., 2019, Language Models are Unsupervised Multitask Learners)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.gpt2.modeling"


@hookimpl
def register_architectures(register):
    """Add GPT-2 with the heads that Transformers 4 had in Flax; GPT-SW3 is stored as GPT-2."""
    register(
        "gpt2",
        config="transformers:GPT2Config",
        heads={
            "Model": f"{MODELING}:FlaxGPT2Model",
            "ForCausalLM": f"{MODELING}:FlaxGPT2LMHeadModel",
        },
        sharding="hfseq_plugins.gpt2.sharding:RULES",
    )
