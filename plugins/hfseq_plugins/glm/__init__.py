"""GLM (GLM Team, 2024, https://arxiv.org/abs/2406.12793).

Llama with rotary embeddings in half of each head.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.glm.modeling"
CITATION = """\
@misc{glm2024chatglm,
  title = {{ChatGLM}: A Family of Large Language Models from {GLM}-130B to {GLM}-4 All Tools},
  author = {{Team GLM}},
  year = {2024},
  url = {https://arxiv.org/abs/2406.12793}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GLM with the task heads that Transformers has in PyTorch."""
    register(
        "glm",
        config="transformers:GlmConfig",
        heads={
            "Model": f"{MODELING}:FlaxGlmModel",
            "ForCausalLM": f"{MODELING}:FlaxGlmForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGlmForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxGlmForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with rotary embeddings in half of each head (GLM "
        "Team, 2024).",
        citation=CITATION,
    )
