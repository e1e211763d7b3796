"""Phi 3 (Abdin et al., 2024, https://arxiv.org/abs/2404.14219): Llama with fused projections."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.phi3.modeling"
CITATION = """\
@misc{abdin2024phi3,
  title = {{Phi}-3 Technical Report: A Highly Capable Language Model Locally on Your Phone},
  author = {Abdin, Marah and Aneja, Jyoti and Awadalla, Hany and Awadallah, Ahmed and others},
  year = {2024},
  url = {https://arxiv.org/abs/2404.14219}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Phi 3 with the task heads that Transformers has in PyTorch."""
    register(
        "phi3",
        config="transformers:Phi3Config",
        heads={
            "Model": f"{MODELING}:FlaxPhi3Model",
            "ForCausalLM": f"{MODELING}:FlaxPhi3ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxPhi3ForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxPhi3ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with fused projections (Abdin et al., 2024).",
        citation=CITATION,
    )
