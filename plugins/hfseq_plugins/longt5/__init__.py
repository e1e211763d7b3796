"""LongT5 (Guo et al., 2021, https://arxiv.org/abs/2112.07916)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.longt5.modeling"
CITATION = """\
@inproceedings{guo2022longt5,
  title = {{LongT5}: Efficient Text-To-Text Transformer for Long Sequences},
  author = {Guo, Mandy and Ainslie, Joshua and Uthus, David and Ontanon, Santiago and
            Ni, Jianmo and Sung, Yun-Hsuan and Yang, Yinfei},
  booktitle = {Findings of the Association for Computational Linguistics: NAACL 2022},
  year = {2022},
  url = {https://arxiv.org/abs/2112.07916}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers LongT5 with the task heads that Transformers 4 had in Flax."""
    register(
        "longt5",
        config="transformers:LongT5Config",
        heads={
            "Model": f"{MODELING}:FlaxLongT5Model",
            "ForSeq2SeqLM": f"{MODELING}:FlaxLongT5ForConditionalGeneration",
        },
        sharding="hfseq_plugins.t5.sharding:RULES",
        card="T5 with block-local attention for long inputs (Guo et al., 2021).",
        citation=CITATION,
    )
