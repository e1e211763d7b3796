"""ESM-2 (Lin et al., 2023, https://doi.org/10.1126/science.ade2574)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.esm.modeling:FlaxEsm"
CITATION = """\
@article{lin2023evolutionary,
  title = {Evolutionary-scale prediction of atomic-level protein structure with a language model},
  author = {Lin, Zeming and Akin, Halil and Rao, Roshan and others},
  journal = {Science},
  volume = {379},
  pages = {1123--1130},
  year = {2023},
  url = {https://doi.org/10.1126/science.ade2574}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ESM with the task heads that PyTorch has."""
    register(
        "esm",
        config="transformers:EsmConfig",
        heads={
            "Model": f"{CLASS}Model",
            "ForMaskedLM": f"{CLASS}ForMaskedLM",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
            "ForTokenClassification": f"{CLASS}ForTokenClassification",
        },
        sharding="hfseq_plugins.esm.modeling:RULES",
        card="A language model of proteins (Lin et al., 2023).",
        citation=CITATION,
    )
