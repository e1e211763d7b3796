"""RegNet (Radosavovic et al., 2020, https://arxiv.org/abs/2003.13678)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.regnet.modeling"
CITATION = """\
@inproceedings{radosavovic2020designing,
  title = {Designing Network Design Spaces},
  author = {Radosavovic, Ilija and Kosaraju, Raj Prateek and Girshick, Ross and He, Kaiming and
            Doll{\\'a}r, Piotr},
  booktitle = {Proceedings of CVPR},
  year = {2020},
  url = {https://arxiv.org/abs/2003.13678}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers RegNet with the task heads that Transformers 4 had in Flax."""
    register(
        "regnet",
        config="transformers:RegNetConfig",
        heads={
            "Model": f"{MODELING}:FlaxRegNetModel",
            "ForImageClassification": f"{MODELING}:FlaxRegNetForImageClassification",
        },
        sharding="hfseq_plugins.resnet.sharding:RULES",
        card="A ResNet with grouped convolutions and optimized widths (Radosavovic et al., 2020).",
        citation=CITATION,
    )
