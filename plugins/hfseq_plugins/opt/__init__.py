"""OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.opt.modeling"
CITATION = """\
@misc{zhang2022opt,
  title = {{OPT}: Open Pre-trained Transformer Language Models},
  author = {Zhang, Susan and Roller, Stephen and Goyal, Naman and Artetxe, Mikel and Chen, Moya and
            Chen, Shuohui and Dewan, Christopher and Diab, Mona and Li, Xian and
            Lin, Xi Victoria and Mihaylov, Todor and Ott, Myle and others},
  year = {2022},
  url = {https://arxiv.org/abs/2205.01068}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers OPT with the task heads that Transformers 4 had in Flax."""
    register(
        "opt",
        config="transformers:OPTConfig",
        heads={
            "Model": f"{MODELING}:FlaxOPTModel",
            "ForCausalLM": f"{MODELING}:FlaxOPTForCausalLM",
        },
        sharding="hfseq_plugins.opt.sharding:RULES",
        card="A causal Transformer decoder (Zhang et al., 2022).",
        citation=CITATION,
    )
