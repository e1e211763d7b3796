"""DINOv2 (Oquab et al., 2024, https://arxiv.org/abs/2304.07193)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.dinov2.modeling"
CITATION = """\
@article{oquab2024dinov2,
  title = {{DINOv2}: Learning Robust Visual Features without Supervision},
  author = {Oquab, Maxime and Darcet, Timoth{\\'e}e and Moutakanni, Th{\\'e}o and Vo, Huy and
            Szafraniec, Marc and Khalidov, Vasil and Fernandez, Pierre and Haziza, Daniel and
            Massa, Francisco and El-Nouby, Alaaeldin and others},
  journal = {Transactions on Machine Learning Research},
  year = {2024},
  url = {https://arxiv.org/abs/2304.07193}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers DINOv2 with the task heads that Transformers 4 had in Flax."""
    register(
        "dinov2",
        config="transformers:Dinov2Config",
        heads={
            "Model": f"{MODELING}:FlaxDinov2Model",
            "ForImageClassification": f"{MODELING}:FlaxDinov2ForImageClassification",
        },
        sharding="hfseq_plugins.dinov2.sharding:RULES",
        card="A Transformer encoder for images of any size (Oquab et al., 2024).",
        citation=CITATION,
    )
