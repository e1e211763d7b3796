"""Ministral (Mistral AI, 2024, https://mistral.ai/news/ministraux).

Mistral with sliding windows in some of the layers.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.ministral.modeling"
CITATION = """\
@misc{mistral2024ministral,
  title = {Un {Ministral}, des {Ministraux}},
  author = {{Mistral AI}},
  year = {2024},
  url = {https://mistral.ai/news/ministraux}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Ministral with the task heads that Transformers has in PyTorch."""
    register(
        "ministral",
        config="transformers:MinistralConfig",
        heads={
            "Model": f"{MODELING}:FlaxMinistralModel",
            "ForCausalLM": f"{MODELING}:FlaxMinistralForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMinistralForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxMinistralForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxMinistralForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with sliding windows in some layers (Mistral AI, 2024).",
        citation=CITATION,
    )
