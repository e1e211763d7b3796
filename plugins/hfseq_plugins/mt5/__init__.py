"""mT5 (Xue et al., 2021, https://arxiv.org/abs/2010.11934)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mt5.modeling"
CITATION = """\
@inproceedings{xue2021mt5,
  title = {{mT5}: A Massively Multilingual Pre-trained Text-to-Text Transformer},
  author = {Xue, Linting and Constant, Noah and Roberts, Adam and Kale, Mihir and Al-Rfou, Rami and
            Siddhant, Aditya and Barua, Aditya and Raffel, Colin},
  booktitle = {Proceedings of NAACL},
  year = {2021},
  url = {https://arxiv.org/abs/2010.11934}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers mT5 with the sharding rules of T5 and the Flax task heads of Transformers 4."""
    register(
        "mt5",
        config="transformers:MT5Config",
        heads={
            "Model": f"{MODELING}:FlaxMT5Model",
            "ForPreTraining": f"{MODELING}:FlaxMT5ForConditionalGeneration",
            "ForSeq2SeqLM": f"{MODELING}:FlaxMT5ForConditionalGeneration",
        },
        sharding="hfseq_plugins.t5.sharding:RULES",
        card="T5 v1.1 for a hundred languages (Xue et al., 2021).",
        citation=CITATION,
    )
