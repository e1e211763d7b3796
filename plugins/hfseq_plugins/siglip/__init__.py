"""SigLIP (Zhai et al., 2023, https://arxiv.org/abs/2303.15343)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.siglip.modeling"
CITATION = """\
@inproceedings{zhai2023sigmoid,
  title = {Sigmoid Loss for Language Image Pre-Training},
  author = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {Proceedings of ICCV},
  year = {2023},
  url = {https://arxiv.org/abs/2303.15343}
}"""
PARTS = {
    "siglip": (
        "SiglipConfig",
        {
            "Model": "FlaxSiglipModel",
            "ForImageClassification": "FlaxSiglipForImageClassification",
        },
        "Images and texts in a joint embedding space",
    ),
    "siglip_text_model": (
        "SiglipTextConfig",
        {"Model": "FlaxSiglipTextModel"},
        "The text encoder of SigLIP",
    ),
    "siglip_vision_model": (
        "SiglipVisionConfig",
        {"Model": "FlaxSiglipVisionModel"},
        "The image encoder of SigLIP",
    ),
}


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers SigLIP, its text encoder and its image encoder."""
    for model_type, (config, classes, description) in PARTS.items():
        register(
            model_type,
            config=f"transformers:{config}",
            heads={task: f"{MODELING}:{name}" for task, name in classes.items()},
            sharding="hfseq_plugins.siglip.modeling:RULES",
            card=f"{description} (Zhai et al., 2023).",
            citation=CITATION,
        )
