"""SigLIP 2 (Tschannen et al., 2025, https://arxiv.org/abs/2502.14786), for images of any shape."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.siglip2.modeling"
CITATION = """\
@misc{tschannen2025siglip2,
  title = {{SigLIP} 2: Multilingual Vision-Language Encoders with Improved Semantic Understanding,
           Localization, and Dense Features},
  author = {Tschannen, Michael and Gritsenko, Alexey and Wang, Xiao and Naeem, Muhammad Ferjad
            and others},
  year = {2025},
  url = {https://arxiv.org/abs/2502.14786}
}"""
PARTS = {
    "siglip2": (
        "Siglip2Config",
        {
            "Model": "FlaxSiglip2Model",
            "ForImageClassification": "FlaxSiglip2ForImageClassification",
        },
        "Images of any shape and texts in a joint embedding space",
    ),
    "siglip2_text_model": (
        "Siglip2TextConfig",
        {"Model": "FlaxSiglip2TextModel"},
        "The text encoder of SigLIP 2",
    ),
    "siglip2_vision_model": (
        "Siglip2VisionConfig",
        {"Model": "FlaxSiglip2VisionModel"},
        "The image encoder of SigLIP 2",
    ),
}


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers SigLIP 2, its text encoder and its image encoder."""
    for model_type, (config, classes, description) in PARTS.items():
        register(
            model_type,
            config=f"transformers:{config}",
            heads={task: f"{MODELING}:{name}" for task, name in classes.items()},
            sharding="hfseq_plugins.siglip2.modeling:RULES",
            card=f"{description} (Tschannen et al., 2025).",
            citation=CITATION,
        )
