"""The vision Transformers of DINOv3 (Siméoni et al., 2025, https://arxiv.org/abs/2508.10104)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.dinov3_vit.modeling"
CITATION = r"""@misc{simeoni2025dinov3,
  title = {{DINOv3}},
  author = {Sim{\'e}oni, Oriane and Vo, Huy V. and Seitzer, Maximilian and Baldassarre, Federico
            and Oquab, Maxime and others},
  year = {2025},
  url = {https://arxiv.org/abs/2508.10104}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the vision Transformers of DINOv3. Transformers has no task heads for them."""
    register(
        "dinov3_vit",
        config="transformers:DINOv3ViTConfig",
        heads={"Model": f"{MODELING}:FlaxDINOv3ViTModel"},
        sharding="hfseq_plugins.dinov3_vit.modeling:RULES",
        card="A Transformer encoder of images with rotary positions (Siméoni et al., 2025).",
        citation=CITATION,
    )
