"""Cohere 2 (Cohere, 2025, https://arxiv.org/abs/2504.00698).

Cohere with sliding-window attention in most layers. The other layers have no rotary embeddings.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.cohere2.modeling"
CITATION = """\
@misc{cohere2025commanda,
  title = {{Command A}: An Enterprise-Ready Large Language Model},
  author = {{Team Cohere}},
  year = {2025},
  url = {https://arxiv.org/abs/2504.00698}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Cohere 2 with the task heads that Transformers has in PyTorch."""
    register(
        "cohere2",
        config="transformers:Cohere2Config",
        heads={
            "Model": f"{MODELING}:FlaxCohere2Model",
            "ForCausalLM": f"{MODELING}:FlaxCohere2ForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with parallel blocks and sliding windows (Cohere, "
        "2025).",
        citation=CITATION,
    )
