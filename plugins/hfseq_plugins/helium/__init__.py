"""Helium (Kyutai, 2025, https://huggingface.co/kyutai/helium-1-2b).

Llama with interleaved rotary embeddings.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.helium.modeling"
CITATION = """\
@misc{kyutai2025helium,
  title = {Helium 1: A Modular and Multilingual {LLM}},
  author = {{Kyutai}},
  year = {2025},
  url = {https://huggingface.co/kyutai/helium-1-2b}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Helium with the task heads that Transformers has in PyTorch."""
    register(
        "helium",
        config="transformers:HeliumConfig",
        heads={
            "Model": f"{MODELING}:FlaxHeliumModel",
            "ForCausalLM": f"{MODELING}:FlaxHeliumForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxHeliumForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxHeliumForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with interleaved rotary embeddings (Kyutai, 2025).",
        citation=CITATION,
    )
