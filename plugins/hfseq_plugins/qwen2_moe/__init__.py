"""Qwen2-MoE (Yang et al., 2024, https://arxiv.org/abs/2407.10671).

Qwen 2 with mixtures of experts and a shared expert.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.qwen2_moe.modeling"
CITATION = """\
@misc{yang2024qwen2,
  title = {{Qwen2} Technical Report},
  author = {Yang, An and Yang, Baosong and Hui, Binyuan and Zheng, Bo and others},
  year = {2024},
  url = {https://arxiv.org/abs/2407.10671}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Qwen2-MoE."""
    register(
        "qwen2_moe",
        config="transformers:Qwen2MoeConfig",
        heads={
            "Model": f"{MODELING}:FlaxQwen2MoeModel",
            "ForCausalLM": f"{MODELING}:FlaxQwen2MoeForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxQwen2MoeForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxQwen2MoeForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxQwen2MoeForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with mixtures of experts and a shared expert (Yang et "
        "al., 2024).",
        citation=CITATION,
    )
