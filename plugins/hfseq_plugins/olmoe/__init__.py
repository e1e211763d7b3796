"""OLMoE (Muennighoff et al., 2024, https://arxiv.org/abs/2409.02060).

OLMo with mixtures of many small experts, and with normalized queries and keys.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.olmoe.modeling"
CITATION = """\
@misc{muennighoff2024olmoe,
  title = {{OLMoE}: Open Mixture-of-Experts Language Models},
  author = {Muennighoff, Niklas and Soldaini, Luca and Groeneveld, Dirk and Lo, Kyle and others},
  year = {2024},
  url = {https://arxiv.org/abs/2409.02060}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers OLMoE."""
    register(
        "olmoe",
        config="transformers:OlmoeConfig",
        heads={
            "Model": f"{MODELING}:FlaxOlmoeModel",
            "ForCausalLM": f"{MODELING}:FlaxOlmoeForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with mixtures of many small experts "
        "(Muennighoff et al., 2024).",
        citation=CITATION,
    )
