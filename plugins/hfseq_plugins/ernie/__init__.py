"""ERNIE (Sun et al., 2019, https://arxiv.org/abs/1904.09223)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.ernie.modeling:FlaxErnie"
CITATION = """\
@misc{sun2019ernie,
  title = {{ERNIE}: Enhanced Representation through Knowledge Integration},
  author = {Sun, Yu and Wang, Shuohuan and Li, Yukun and Feng, Shikun and Chen, Xuyi and
            Zhang, Han and Tian, Xin and Zhu, Danxiang and Tian, Hao and Wu, Hua},
  year = {2019},
  url = {https://arxiv.org/abs/1904.09223}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ERNIE with the task heads that PyTorch has, sharded like BERT."""
    register(
        "ernie",
        config="transformers:ErnieConfig",
        heads={
            "Model": f"{CLASS}Model",
            "ForPreTraining": f"{CLASS}ForPreTraining",
            "ForMaskedLM": f"{CLASS}ForMaskedLM",
            "ForCausalLM": f"{CLASS}ForCausalLM",
            "ForNextSentencePrediction": f"{CLASS}ForNextSentencePrediction",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
            "ForMultipleChoice": f"{CLASS}ForMultipleChoice",
            "ForTokenClassification": f"{CLASS}ForTokenClassification",
            "ForQuestionAnswering": f"{CLASS}ForQuestionAnswering",
        },
        sharding="hfseq_plugins.ernie.modeling:RULES",
        card="BERT with task embeddings (Sun et al., 2019).",
        citation=CITATION,
    )
