"""OLMo 2 (Walsh et al., 2025, https://arxiv.org/abs/2501.00656).

Llama with norms after its blocks and normalized queries and keys.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.olmo2.modeling"
CITATION = """\
@misc{walsh2025olmo2,
  title = {2 {OLMo} 2 Furious},
  author = {Walsh, Pete and Soldaini, Luca and Groeneveld, Dirk and Lo, Kyle and others},
  year = {2025},
  url = {https://arxiv.org/abs/2501.00656}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers OLMo 2 with the task heads that Transformers has in PyTorch."""
    register(
        "olmo2",
        config="transformers:Olmo2Config",
        heads={
            "Model": f"{MODELING}:FlaxOlmo2Model",
            "ForCausalLM": f"{MODELING}:FlaxOlmo2ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxOlmo2ForSequenceClassification",
        },
        sharding="hfseq_plugins.olmo2.modeling:RULES",
        card="A causal Transformer decoder with norms after its blocks (Walsh et al., 2025).",
        citation=CITATION,
    )
