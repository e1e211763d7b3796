"""Granite-MoE (Shen et al., 2024, https://arxiv.org/abs/2408.13359).

Granite with mixtures of experts.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.granitemoe.modeling"
CITATION = """\
@misc{shen2024power,
  title = {Power Scheduler: A Batch Size and Token Number Agnostic Learning Rate Scheduler},
  author = {Shen, Yikang and Stallone, Matthew and Mishra, Mayank and Zhang, Gaoyuan and others},
  year = {2024},
  url = {https://arxiv.org/abs/2408.13359}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Granite-MoE."""
    register(
        "granitemoe",
        config="transformers:GraniteMoeConfig",
        heads={
            "Model": f"{MODELING}:FlaxGraniteMoeModel",
            "ForCausalLM": f"{MODELING}:FlaxGraniteMoeForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with factors of its residual branches and "
        "mixtures of experts (Shen et al., 2024).",
        citation=CITATION,
    )
