"""Marian (Junczys-Dowmunt et al., 2018, https://arxiv.org/abs/1804.00344): the opus-mt models."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.marian.modeling"
CITATION = r"""@inproceedings{junczys2018marian,
  title = {{M}arian: Fast Neural Machine Translation in {C++}},
  author = {Junczys-Dowmunt, Marcin and Grundkiewicz, Roman and Dwojak, Tomasz and Hoang, Hieu and
            Heafield, Kenneth and Neckermann, Tom and Seide, Frank and Germann, Ulrich and
            Aji, Alham Fikri and Bogoychev, Nikolay and Martins, Andr{\'e} F. T. and
            Birch, Alexandra},
  booktitle = {Proceedings of ACL 2018, System Demonstrations},
  year = {2018},
  url = {https://arxiv.org/abs/1804.00344}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Marian with the task heads that Transformers 4 had in Flax."""
    register(
        "marian",
        config="transformers:MarianConfig",
        heads={
            "Model": f"{MODELING}:FlaxMarianModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxMarianMTModel",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="The Transformer encoder-decoder of Marian (Junczys-Dowmunt et al., 2018).",
        citation=CITATION,
    )
