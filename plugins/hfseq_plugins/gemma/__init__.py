"""Gemma (Gemma Team, 2024, https://arxiv.org/abs/2403.08295): Llama with scaled embeddings."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gemma.modeling"
CITATION = """\
@misc{gemma2024,
  title = {Gemma: Open Models Based on {Gemini} Research and Technology},
  author = {{Gemma Team}},
  year = {2024},
  url = {https://arxiv.org/abs/2403.08295}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Gemma with the task heads that Transformers has in PyTorch."""
    register(
        "gemma",
        config="transformers:GemmaConfig",
        heads={
            "Model": f"{MODELING}:FlaxGemmaModel",
            "ForCausalLM": f"{MODELING}:FlaxGemmaForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGemmaForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxGemmaForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with scaled embeddings (Gemma Team, 2024).",
        citation=CITATION,
    )
