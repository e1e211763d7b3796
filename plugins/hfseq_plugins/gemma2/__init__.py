"""Gemma 2 (Gemma Team, 2024, https://arxiv.org/abs/2408.00118).

It is Gemma with additional norms, soft-capped attention scores and logits, and sliding windows.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gemma2.modeling"
CITATION = """\
@misc{gemma2024improving,
  title = {Gemma 2: Improving Open Language Models at a Practical Size},
  author = {{Gemma Team}},
  year = {2024},
  url = {https://arxiv.org/abs/2408.00118}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Gemma 2."""
    register(
        "gemma2",
        config="transformers:Gemma2Config",
        heads={
            "Model": f"{MODELING}:FlaxGemma2Model",
            "ForCausalLM": f"{MODELING}:FlaxGemma2ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGemma2ForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxGemma2ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal decoder with soft-capping and sliding windows (Gemma Team, 2024).",
        citation=CITATION,
    )
