"""LiT (Zhai et al., 2022, https://arxiv.org/abs/2111.07991).

It is CLIP with an image encoder and a text encoder from any supported families.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.vision_text_dual_encoder.modeling"
CITATION = """\
@inproceedings{zhai2022lit,
  title = {{LiT}: Zero-Shot Transfer with Locked-image text Tuning},
  author = {Zhai, Xiaohua and Wang, Xiao and Mustafa, Basil and Steiner, Andreas and
            Keysers, Daniel and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {Proceedings of CVPR},
  year = {2022},
  url = {https://arxiv.org/abs/2111.07991}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the dual encoder that Transformers 4 had in Flax."""
    register(
        "vision-text-dual-encoder",
        config="transformers:VisionTextDualEncoderConfig",
        heads={"Model": f"{MODELING}:FlaxVisionTextDualEncoderModel"},
        sharding="hfseq_plugins.vision_text_dual_encoder.sharding:RULES",
        card="An image encoder and a text encoder with a joint space (Zhai et al., 2022).",
        citation=CITATION,
    )
