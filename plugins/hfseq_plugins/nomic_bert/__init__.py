"""NomicBERT (Nussbaum et al., 2024, https://arxiv.org/abs/2402.01613)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.nomic_bert.modeling"
CITATION = """\
@misc{nussbaum2024nomic,
  title = {{Nomic Embed}: Training a Reproducible Long Context Text Embedder},
  author = {Nussbaum, Zach and Morris, John X. and Duderstadt, Brandon and Mulyar, Andriy},
  year = {2024},
  url = {https://arxiv.org/abs/2402.01613}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers NomicBERT with the task heads that PyTorch has."""
    register(
        "nomic_bert",
        config="transformers:NomicBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxNomicBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxNomicBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxNomicBertForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxNomicBertForTokenClassification",
        },
        sharding="hfseq_plugins.rotary_bert.modeling:RULES",
        card="BERT with rotary positions and gated layers (Nussbaum et al., 2024).",
        citation=CITATION,
    )
