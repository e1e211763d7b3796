"""gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925).

A Llama-style decoder with attention sinks and mixtures of experts.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gpt_oss.modeling"
CITATION = """\
@misc{openai2025gptoss,
  title = {gpt-oss-120b \\& gpt-oss-20b Model Card},
  author = {{OpenAI}},
  year = {2025},
  url = {https://arxiv.org/abs/2508.10925}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers gpt-oss."""
    register(
        "gpt_oss",
        config="transformers:GptOssConfig",
        heads={
            "Model": f"{MODELING}:FlaxGptOssModel",
            "ForCausalLM": f"{MODELING}:FlaxGptOssForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGptOssForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxGptOssForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:CLAMPED_RULES",
        card="A causal Transformer decoder with attention sinks and mixtures of experts (OpenAI, "
        "2025).",
        citation=CITATION,
    )
