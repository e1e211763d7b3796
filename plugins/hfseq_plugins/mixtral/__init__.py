"""Mixtral (Jiang et al., 2024, https://arxiv.org/abs/2401.04088).

Mistral with mixtures of experts.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mixtral.modeling"
CITATION = """\
@misc{jiang2024mixtral,
  title = {Mixtral of Experts},
  author = {Jiang, Albert Q. and Sablayrolles, Alexandre and Roux, Antoine and others},
  year = {2024},
  url = {https://arxiv.org/abs/2401.04088}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Mixtral."""
    register(
        "mixtral",
        config="transformers:MixtralConfig",
        heads={
            "Model": f"{MODELING}:FlaxMixtralModel",
            "ForCausalLM": f"{MODELING}:FlaxMixtralForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMixtralForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxMixtralForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxMixtralForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with mixtures of experts (Jiang et al., 2024).",
        citation=CITATION,
    )
