"""RoBERTa-PreLayerNorm (Wettig et al., 2023, https://arxiv.org/abs/2202.08005)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.roberta_prelayernorm.modeling:FlaxRobertaPreLayerNorm"
CITATION = """\
@inproceedings{wettig2023should,
  title = {Should You Mask 15\\% in Masked Language Modeling?},
  author = {Wettig, Alexander and Gao, Tianyu and Zhong, Zexuan and Chen, Danqi},
  booktitle = {Proceedings of EACL},
  year = {2023},
  url = {https://arxiv.org/abs/2202.08005}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers RoBERTa-PreLayerNorm with the task heads that Transformers 4 had in Flax."""
    register(
        "roberta-prelayernorm",
        config="transformers:RobertaPreLayerNormConfig",
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
        card="RoBERTa with pre-norm layers (Wettig et al., 2023).",
        citation=CITATION,
    )
