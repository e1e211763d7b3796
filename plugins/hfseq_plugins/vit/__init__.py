"""ViT (Dosovitskiy et al., 2021, https://arxiv.org/abs/2010.11929)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.vit.modeling"
CITATION = """\
@inproceedings{dosovitskiy2021image,
  title = {An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale},
  author = {Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and Weissenborn, Dirk and
            Zhai, Xiaohua and Unterthiner, Thomas and Dehghani, Mostafa and Minderer, Matthias and
            Heigold, Georg and Gelly, Sylvain and Uszkoreit, Jakob and Houlsby, Neil},
  booktitle = {Proceedings of ICLR},
  year = {2021},
  url = {https://arxiv.org/abs/2010.11929}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ViT with the task heads that Transformers 4 had in Flax."""
    register(
        "vit",
        config="transformers:ViTConfig",
        heads={
            "Model": f"{MODELING}:FlaxViTModel",
            "ForImageClassification": f"{MODELING}:FlaxViTForImageClassification",
        },
        sharding="hfseq_plugins.vit.sharding:RULES",
        card="A Transformer encoder of image patches (Dosovitskiy et al., 2021).",
        citation=CITATION,
    )
