"""The VQ Transformer (Lingle, 2024, Transformer-VQ: Linear-Time Transformers via VQ)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.vq_transformer.modeling"
CITATION = """\
@inproceedings{lingle2024transformervq,
  title = {{Transformer-VQ}: Linear-Time Transformers via Vector Quantization},
  author = {Lingle, Lucas D.},
  booktitle = {Proceedings of ICLR},
  year = {2024},
  url = {https://arxiv.org/abs/2309.16354}
}"""


@hookimpl
def register_architectures(register):
    """Add the VQ Transformer: causal, linear in the length, with a state of fixed size."""
    register(
        "vq_transformer",
        config="hfseq_plugins.vq_transformer.configuration:VQTransformerConfig",
        heads={
            "Model": f"{MODELING}:FlaxVQTransformerModel",
            "ForCausalLM": f"{MODELING}:FlaxVQTransformerForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxVQTransformerForSequenceClassification",
        },
        sharding="hfseq_plugins.vq_transformer.sharding:RULES",
        card="A decoder with linear-time attention over quantised keys (Lingle, 2024).",
        citation=CITATION,
    )
