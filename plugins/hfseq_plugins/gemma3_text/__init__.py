"""Gemma 3 (Gemma Team, 2025, https://arxiv.org/abs/2503.19786).

It is Gemma with normalized queries and keys. Most layers use sliding-window attention.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gemma3_text.modeling"
CITATION = """\
@misc{gemma2025gemma3,
  title = {Gemma 3 Technical Report},
  author = {{Gemma Team}},
  year = {2025},
  url = {https://arxiv.org/abs/2503.19786}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Gemma 3."""
    register(
        "gemma3_text",
        config="transformers:Gemma3TextConfig",
        heads={
            "Model": f"{MODELING}:FlaxGemma3TextModel",
            "ForCausalLM": f"{MODELING}:FlaxGemma3ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGemma3TextForSequenceClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal decoder with sliding windows in most layers (Gemma Team, 2025).",
        citation=CITATION,
    )
