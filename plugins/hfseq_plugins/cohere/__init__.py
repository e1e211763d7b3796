"""Cohere (Cohere, 2024, https://huggingface.co/CohereLabs/c4ai-command-r-v01).

A decoder without biases, whose attention and feed-forward blocks run in parallel.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.cohere.modeling"
CITATION = """\
@misc{cohere2024commandr,
  title = {{Command R}},
  author = {{Cohere}},
  year = {2024},
  url = {https://huggingface.co/CohereLabs/c4ai-command-r-v01}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Cohere with the task heads that Transformers has in PyTorch."""
    register(
        "cohere",
        config="transformers:CohereConfig",
        heads={
            "Model": f"{MODELING}:FlaxCohereModel",
            "ForCausalLM": f"{MODELING}:FlaxCohereForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with parallel attention and feed-forward blocks "
        "(Cohere, 2024).",
        citation=CITATION,
    )
