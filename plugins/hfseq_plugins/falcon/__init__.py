"""Falcon (Almazrouei et al., 2023, https://arxiv.org/abs/2311.16867)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.falcon.modeling"
CITATION = """\
@misc{almazrouei2023falcon,
  title = {The {Falcon} Series of Open Language Models},
  author = {Almazrouei, Ebtesam and Alobeidli, Hamza and Alshamsi, Abdulaziz and others},
  year = {2023},
  url = {https://arxiv.org/abs/2311.16867}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Falcon with the task heads that Transformers has in PyTorch."""
    register(
        "falcon",
        config="transformers:FalconConfig",
        heads={
            "Model": f"{MODELING}:FlaxFalconModel",
            "ForCausalLM": f"{MODELING}:FlaxFalconForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxFalconForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxFalconForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxFalconForTokenClassification",
        },
        sharding="hfseq_plugins.falcon.modeling:RULES",
        card="A causal Transformer decoder whose query heads share keys and values "
        "(Almazrouei et al., 2023).",
        citation=CITATION,
    )
