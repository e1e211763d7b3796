"""OLMo (Groeneveld et al., 2024, https://arxiv.org/abs/2402.00838).

Llama with norms that have no parameters.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.olmo.modeling"
CITATION = """\
@misc{groeneveld2024olmo,
  title = {{OLMo}: Accelerating the Science of Language Models},
  author = {Groeneveld, Dirk and Beltagy, Iz and Walsh, Pete and Bhagia, Akshita and others},
  year = {2024},
  url = {https://arxiv.org/abs/2402.00838}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers OLMo with the task heads that Transformers has in PyTorch."""
    register(
        "olmo",
        config="transformers:OlmoConfig",
        heads={
            "Model": f"{MODELING}:FlaxOlmoModel",
            "ForCausalLM": f"{MODELING}:FlaxOlmoForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxOlmoForSequenceClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder whose norms have no parameters (Groeneveld et al., "
        "2024).",
        citation=CITATION,
    )
