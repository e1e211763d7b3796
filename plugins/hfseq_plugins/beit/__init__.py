"""BEiT (Bao et al., 2022, https://arxiv.org/abs/2106.08254)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.beit.modeling"
CITATION = """\
@inproceedings{bao2022beit,
  title = {{BEiT}: {BERT} Pre-Training of Image Transformers},
  author = {Bao, Hangbo and Dong, Li and Piao, Songhao and Wei, Furu},
  booktitle = {Proceedings of ICLR},
  year = {2022},
  url = {https://arxiv.org/abs/2106.08254}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers BEiT with the task heads that Transformers 4 had in Flax."""
    register(
        "beit",
        config="transformers:BeitConfig",
        heads={
            "Model": f"{MODELING}:FlaxBeitModel",
            "ForImageClassification": f"{MODELING}:FlaxBeitForImageClassification",
            "ForMaskedImageModeling": f"{MODELING}:FlaxBeitForMaskedImageModeling",
        },
        sharding="hfseq_plugins.beit.sharding:RULES",
        card="An image encoder, trained on masked patches (Bao et al., 2022).",
        citation=CITATION,
    )
