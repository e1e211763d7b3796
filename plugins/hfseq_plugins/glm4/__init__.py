"""GLM-4 (GLM Team, 2024, https://arxiv.org/abs/2406.12793).

GLM with norms before and after its blocks.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.glm4.modeling"
CITATION = """\
@misc{glm2024chatglm,
  title = {{ChatGLM}: A Family of Large Language Models from {GLM}-130B to {GLM}-4 All Tools},
  author = {{Team GLM}},
  year = {2024},
  url = {https://arxiv.org/abs/2406.12793}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GLM-4 with the task heads that Transformers has in PyTorch."""
    register(
        "glm4",
        config="transformers:Glm4Config",
        heads={
            "Model": f"{MODELING}:FlaxGlm4Model",
            "ForCausalLM": f"{MODELING}:FlaxGlm4ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGlm4ForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxGlm4ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with norms before and after its blocks (GLM Team, "
        "2024).",
        citation=CITATION,
    )
