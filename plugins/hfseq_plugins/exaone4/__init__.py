"""EXAONE 4 (LG AI Research, 2025, https://arxiv.org/abs/2507.11407).

A decoder with norms after its blocks. Only sliding-window layers have rotary embeddings.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.exaone4.modeling"
CITATION = """\
@misc{lg2025exaone4,
  title = {{EXAONE} 4.0: Unified Large Language Models Integrating Non-reasoning and Reasoning
           Modes},
  author = {{LG AI Research}},
  year = {2025},
  url = {https://arxiv.org/abs/2507.11407}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers EXAONE 4 with the task heads that Transformers has in PyTorch."""
    register(
        "exaone4",
        config="transformers:Exaone4Config",
        heads={
            "Model": f"{MODELING}:FlaxExaone4Model",
            "ForCausalLM": f"{MODELING}:FlaxExaone4ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxExaone4ForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxExaone4ForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxExaone4ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with norms after its blocks (LG AI Research, 2025).",
        citation=CITATION,
    )
