"""ResNet (He et al., 2016, https://arxiv.org/abs/1512.03385)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.resnet.modeling"
CITATION = """\
@inproceedings{he2016deep,
  title = {Deep Residual Learning for Image Recognition},
  author = {He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  booktitle = {Proceedings of CVPR},
  year = {2016},
  url = {https://arxiv.org/abs/1512.03385}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ResNet with the task heads that Transformers 4 had in Flax."""
    register(
        "resnet",
        config="transformers:ResNetConfig",
        heads={
            "Model": f"{MODELING}:FlaxResNetModel",
            "ForImageClassification": f"{MODELING}:FlaxResNetForImageClassification",
        },
        sharding="hfseq_plugins.resnet.sharding:RULES",
        card="A convolutional network with residual blocks (He et al., 2016).",
        citation=CITATION,
    )
