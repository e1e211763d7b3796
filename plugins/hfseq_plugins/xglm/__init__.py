"""XGLM (Lin et al., 2022, https://arxiv.org/abs/2112.10668)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.xglm.modeling"
CITATION = """\
@inproceedings{lin2022few,
  title = {Few-shot Learning with Multilingual Generative Language Models},
  author = {Lin, Xi Victoria and Mihaylov, Todor and Artetxe, Mikel and Wang, Tianlu and
            Chen, Shuohui and Simig, Daniel and Ott, Myle and Goyal, Naman and Bhosale, Shruti and
            Du, Jingfei and Pasunuru, Ramakanth and Shleifer, Sam and Koura, Punit Singh and
            Chaudhary, Vishrav and O'Horo, Brian and Wang, Jeff and Zettlemoyer, Luke and
            Kozareva, Zornitsa and Diab, Mona and Stoyanov, Veselin and Li, Xian},
  booktitle = {Proceedings of EMNLP},
  year = {2022},
  url = {https://arxiv.org/abs/2112.10668}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers XGLM with the Flax task heads of Transformers 4, sharded like BART."""
    register(
        "xglm",
        config="transformers:XGLMConfig",
        heads={
            "Model": f"{MODELING}:FlaxXGLMModel",
            "ForCausalLM": f"{MODELING}:FlaxXGLMForCausalLM",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A Transformer decoder for thirty languages (Lin et al., 2022).",
        citation=CITATION,
    )
