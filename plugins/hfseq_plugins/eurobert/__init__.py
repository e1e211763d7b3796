"""EuroBERT (Boizard et al., 2025, https://arxiv.org/abs/2503.05500).

Its layers are those of Llama, with bidirectional attention.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.eurobert.modeling"
CITATION = """\
@misc{boizard2025eurobert,
  title = {{EuroBERT}: Scaling Multilingual Encoders for European Languages},
  author = {Boizard, Nicolas and Gisserot-Boukhlef, Hippolyte and Alves, Duarte M. and others},
  year = {2025},
  url = {https://arxiv.org/abs/2503.05500}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers EuroBERT."""
    register(
        "eurobert",
        config="transformers:EuroBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxEuroBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxEuroBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxEuroBertForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxEuroBertForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A multilingual Transformer encoder with Llama layers (Boizard et al., 2025).",
        citation=CITATION,
    )
