"""Jina embeddings v3 (Sturua et al., 2024, https://arxiv.org/abs/2409.10173)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.jina_embeddings_v3.modeling"
CITATION = """\
@misc{sturua2024jina,
  title = {jina-embeddings-v3: Multilingual Embeddings With Task {LoRA}},
  author = {Sturua, Saba and Mohr, Isabelle and Akram, Mohammad Kalim and others},
  year = {2024},
  url = {https://arxiv.org/abs/2409.10173}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Jina embeddings v3 with the task heads that PyTorch has."""
    heads = (
        *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        "ForQuestionAnswering",
    )
    register(
        "jina_embeddings_v3",
        config="transformers:JinaEmbeddingsV3Config",
        heads={head: f"{MODELING}:FlaxJinaEmbeddingsV3{head}" for head in heads},
        sharding="hfseq_plugins.rotary_bert.modeling:RULES",
        card="XLM-RoBERTa with rotary positions (Sturua et al., 2024).",
        citation=CITATION,
    )
