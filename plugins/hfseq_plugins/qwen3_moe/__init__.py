"""Qwen3-MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388).

Qwen 3 with mixtures of experts.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.qwen3_moe.modeling"
CITATION = """\
@misc{yang2025qwen3,
  title = {{Qwen3} Technical Report},
  author = {Yang, An and Li, Anfeng and Yang, Baosong and Zhang, Beichen and others},
  year = {2025},
  url = {https://arxiv.org/abs/2505.09388}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Qwen3-MoE."""
    register(
        "qwen3_moe",
        config="transformers:Qwen3MoeConfig",
        heads={
            "Model": f"{MODELING}:FlaxQwen3MoeModel",
            "ForCausalLM": f"{MODELING}:FlaxQwen3MoeForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxQwen3MoeForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxQwen3MoeForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxQwen3MoeForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with normalized queries and keys and mixtures of "
        "experts (Yang et al., 2025).",
        citation=CITATION,
    )
