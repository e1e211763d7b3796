"""Granite (Granite Team, 2024, https://github.com/ibm-granite/granite-3.0-language-models).

Llama with factors for embeddings, attention scores, residuals and logits.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.granite.modeling"
CITATION = """\
@misc{granite2024,
  title = {Granite 3.0 Language Models},
  author = {{Granite Team, IBM}},
  year = {2024},
  url = {https://github.com/ibm-granite/granite-3.0-language-models}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Granite with the task heads that Transformers has in PyTorch."""
    register(
        "granite",
        config="transformers:GraniteConfig",
        heads={
            "Model": f"{MODELING}:FlaxGraniteModel",
            "ForCausalLM": f"{MODELING}:FlaxGraniteForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with factors of its residual branches (Granite Team, "
        "2024).",
        citation=CITATION,
    )
