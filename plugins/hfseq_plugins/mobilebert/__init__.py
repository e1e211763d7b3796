"""MobileBERT (Sun et al., 2020, https://arxiv.org/abs/2004.02984)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.mobilebert.modeling:FlaxMobileBert"
CITATION = """\
@inproceedings{sun2020mobilebert,
  title = {{MobileBERT}: a Compact Task-Agnostic {BERT} for Resource-Limited Devices},
  author = {Sun, Zhiqing and Yu, Hongkun and Song, Xiaodan and Liu, Renjie and Yang, Yiming and
            Zhou, Denny},
  booktitle = {Proceedings of ACL},
  year = {2020},
  url = {https://arxiv.org/abs/2004.02984}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers MobileBERT with the task heads that PyTorch has."""
    register(
        "mobilebert",
        config="transformers:MobileBertConfig",
        heads={
            "Model": f"{CLASS}Model",
            "ForPreTraining": f"{CLASS}ForPreTraining",
            "ForMaskedLM": f"{CLASS}ForMaskedLM",
            "ForNextSentencePrediction": f"{CLASS}ForNextSentencePrediction",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
            "ForMultipleChoice": f"{CLASS}ForMultipleChoice",
            "ForTokenClassification": f"{CLASS}ForTokenClassification",
            "ForQuestionAnswering": f"{CLASS}ForQuestionAnswering",
        },
        sharding="hfseq_plugins.mobilebert.modeling:RULES",
        card="A thin BERT with bottlenecks (Sun et al., 2020).",
        citation=CITATION,
    )
