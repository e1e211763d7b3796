"""Phi (Gunasekar et al., 2023, https://arxiv.org/abs/2306.11644).

A decoder whose attention and feed-forward blocks run in parallel. Rotary embeddings rotate only a
part of each head.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.phi.modeling"
CITATION = r"""@misc{gunasekar2023textbooks,
  title = {Textbooks Are All You Need},
  author = {Gunasekar, Suriya and Zhang, Yi and Aneja, Jyoti and Mendes, Caio C{\'e}sar Teodoro
            and others},
  year = {2023},
  url = {https://arxiv.org/abs/2306.11644}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Phi with the task heads that Transformers has in PyTorch."""
    register(
        "phi",
        config="transformers:PhiConfig",
        heads={
            "Model": f"{MODELING}:FlaxPhiModel",
            "ForCausalLM": f"{MODELING}:FlaxPhiForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxPhiForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxPhiForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with parallel attention and feed-forward blocks "
        "(Gunasekar et al., 2023).",
        citation=CITATION,
    )
