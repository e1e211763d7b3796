"""CLIP (Radford et al., 2021, https://arxiv.org/abs/2103.00020)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.clip.modeling"
CITATION = """\
@inproceedings{radford2021learning,
  title = {Learning Transferable Visual Models From Natural Language Supervision},
  author = {Radford, Alec and Kim, Jong Wook and Hallacy, Chris and Ramesh, Aditya and Goh, Gabriel
            and Agarwal, Sandhini and Sastry, Girish and Askell, Amanda and Mishkin, Pamela and
            Clark, Jack and Krueger, Gretchen and Sutskever, Ilya},
  booktitle = {Proceedings of ICML},
  year = {2021},
  url = {https://arxiv.org/abs/2103.00020}
}"""
PARTS = {
    "clip": (
        "CLIPConfig",
        {"Model": "FlaxCLIPModel"},
        "Images and texts in a joint embedding space",
    ),
    "clip_text_model": (
        "CLIPTextConfig",
        {"Model": "FlaxCLIPTextModel", "WithProjection": "FlaxCLIPTextModelWithProjection"},
        "The text encoder of CLIP",
    ),
    "clip_vision_model": (
        "CLIPVisionConfig",
        {"Model": "FlaxCLIPVisionModel"},
        "The image encoder of CLIP",
    ),
}


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers CLIP and its two encoders, with the classes that Transformers 4 had in Flax."""
    for model_type, (config, classes, description) in PARTS.items():
        register(
            model_type,
            config=f"transformers:{config}",
            heads={task: f"{MODELING}:{name}" for task, name in classes.items()},
            sharding="hfseq_plugins.clip.sharding:RULES",
            card=f"{description} (Radford et al., 2021).",
            citation=CITATION,
        )
