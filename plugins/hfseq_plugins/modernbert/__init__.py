"""ModernBERT (Warner et al., 2024, https://arxiv.org/abs/2412.13663)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.modernbert.modeling"
CITATION = """\
@misc{warner2024modernbert,
  title = {Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory
           Efficient, and Long Context Finetuning and Inference},
  author = {Warner, Benjamin and Chaffin, Antoine and Clavi{\\'e}, Benjamin and others},
  year = {2024},
  url = {https://arxiv.org/abs/2412.13663}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ModernBERT with the task heads that PyTorch has."""
    register(
        "modernbert",
        config="transformers:ModernBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxModernBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxModernBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxModernBertForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxModernBertForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxModernBertForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxModernBertForMultipleChoice",
        },
        sharding=f"{MODELING}:RULES",
        card="An encoder with rotary embeddings and sliding windows (Warner et al., 2024).",
        citation=CITATION,
    )
