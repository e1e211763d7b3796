"""The translation model of flax/examples/wmt, with the Differential Transformer as an option.

Checkpoints have the format of PEGASUS or Marian if one of these can compute the same function.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.wmt_transformer.modeling"
CITATION = r"""@inproceedings{vaswani2017attention,
  title = {Attention Is All You Need},
  author = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and
            Jones, Llion and Gomez, Aidan N. and Kaiser, {\L}ukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017},
  url = {https://arxiv.org/abs/1706.03762}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the two model classes of the translation model."""
    register(
        "wmt_transformer",
        config="hfseq_plugins.wmt_transformer.configuration:WMTTransformerConfig",
        heads={
            "Model": f"{MODELING}:FlaxWMTTransformerModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxWMTTransformerForConditionalGeneration",
        },
        sharding="hfseq_plugins.wmt_transformer.sharding:RULES",
        card="The Transformer encoder-decoder for translation (Vaswani et al., 2017).",
        citation=CITATION,
    )
