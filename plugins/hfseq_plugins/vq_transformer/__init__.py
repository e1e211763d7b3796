"""The VQ Transformer (Lingle, 2024, Transformer-VQ: Linear-Time Transformers via VQ).

It is a causal language model. Its cost grows linearly with the sequence length, and its state in
generation has a fixed size.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

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
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the three model classes of the VQ Transformer."""
    register(
        "vq_transformer",
        config="hfseq_plugins.vq_transformer.configuration:VQTransformerConfig",
        heads={
            "Model": f"{MODELING}:FlaxVQTransformerModel",
            "ForCausalLM": f"{MODELING}:FlaxVQTransformerForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxVQTransformerForSequenceClassification",
        },
        sharding="hfseq_plugins.vq_transformer.sharding:RULES",
        card="A decoder with linear-time attention over quantized keys (Lingle, 2024).",
        citation=CITATION,
    )
