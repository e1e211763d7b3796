"""OLMo 3 (Olmo Team, 2025, https://arxiv.org/abs/2512.13961): OLMo 2 with sliding windows."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.olmo3.modeling"
CITATION = """\
@misc{olmo2025olmo3,
  title = {Olmo 3},
  author = {{Team Olmo}},
  year = {2025},
  url = {https://arxiv.org/abs/2512.13961}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers OLMo 3 with the task heads that Transformers has in PyTorch."""
    register(
        "olmo3",
        config="transformers:Olmo3Config",
        heads={
            "Model": f"{MODELING}:FlaxOlmo3Model",
            "ForCausalLM": f"{MODELING}:FlaxOlmo3ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxOlmo3ForSequenceClassification",
        },
        sharding="hfseq_plugins.olmo2.modeling:RULES",
        card="A causal Transformer decoder with norms after its blocks and sliding windows "
        "(Olmo Team, 2025).",
        citation=CITATION,
    )
