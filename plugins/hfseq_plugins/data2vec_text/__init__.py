"""Data2Vec for text (Baevski et al., 2022, https://arxiv.org/abs/2202.03555)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.data2vec_text.modeling:FlaxData2VecText"
CITATION = """\
@inproceedings{baevski2022data2vec,
  title = {data2vec: A General Framework for Self-supervised Learning in Speech, Vision and
           Language},
  author = {Baevski, Alexei and Hsu, Wei-Ning and Xu, Qiantong and Babu, Arun and Gu, Jiatao and
            Auli, Michael},
  booktitle = {Proceedings of ICML},
  year = {2022},
  url = {https://arxiv.org/abs/2202.03555}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Data2Vec for text with the task heads that PyTorch has, sharded like BERT."""
    register(
        "data2vec-text",
        config="transformers:Data2VecTextConfig",
        heads={
            "Model": f"{CLASS}Model",
            "ForPreTraining": f"{CLASS}ForMaskedLM",
            "ForMaskedLM": f"{CLASS}ForMaskedLM",
            "ForCausalLM": f"{CLASS}ForCausalLM",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
            "ForMultipleChoice": f"{CLASS}ForMultipleChoice",
            "ForTokenClassification": f"{CLASS}ForTokenClassification",
            "ForQuestionAnswering": f"{CLASS}ForQuestionAnswering",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
        card="RoBERTa that was trained to predict hidden states (Baevski et al., 2022).",
        citation=CITATION,
    )
