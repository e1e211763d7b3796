"""Qwen 3 (Yang et al., 2025, https://arxiv.org/abs/2505.09388): Llama with QK norm."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.qwen3.modeling"
CITATION = """\
@misc{yang2025qwen3,
  title = {{Qwen3} Technical Report},
  author = {Yang, An and Li, Anfeng and Yang, Baosong and Zhang, Beichen and others},
  year = {2025},
  url = {https://arxiv.org/abs/2505.09388}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Qwen 3."""
    register(
        "qwen3",
        config="transformers:Qwen3Config",
        heads={
            "Model": f"{MODELING}:FlaxQwen3Model",
            "ForCausalLM": f"{MODELING}:FlaxQwen3ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxQwen3ForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxQwen3ForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxQwen3ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with normalized queries and keys (Yang et al., 2025).",
        citation=CITATION,
    )
