"""The Transformer of flax/examples/wmt, pre- or post-norm, and the Differential Transformer."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.wmt_transformer.modeling"


@hookimpl
def register_architectures(register):
    """Add the translation model, which is stored as PEGASUS or Marian where it equals them."""
    register(
        "wmt_transformer",
        config="hfseq_plugins.wmt_transformer.configuration:WMTTransformerConfig",
        heads={
            "Model": f"{MODELING}:FlaxWMTTransformerModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxWMTTransformerForConditionalGeneration",
        },
        sharding="hfseq_plugins.wmt_transformer.sharding:RULES",
    )
