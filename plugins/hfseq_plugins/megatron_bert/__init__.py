"""MegatronBERT (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.megatron_bert.modeling"


@hookimpl
def register_architectures(register):
    """Add MegatronBERT, of which Transformers 4 had no Flax classes."""
    register(
        "megatron-bert",
        config="transformers:MegatronBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxMegatronBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxMegatronBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMegatronBertForSequenceClassification",
        },
        sharding="hfseq_plugins.megatron_bert.sharding:RULES",
    )
