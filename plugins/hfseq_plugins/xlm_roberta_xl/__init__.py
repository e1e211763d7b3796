"""XLM-RoBERTa-XL (Goyal et al., 2021, https://arxiv.org/abs/2105.00572)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.xlm_roberta_xl.modeling:FlaxXLMRobertaXL"
CITATION = """\
@misc{goyal2021larger,
  title = {Larger-Scale Transformers for Multilingual Masked Language Modeling},
  author = {Goyal, Naman and Du, Jingfei and Ott, Myle and Anantharaman, Giri and
            Conneau, Alexis},
  year = {2021},
  url = {https://arxiv.org/abs/2105.00572}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers XLM-RoBERTa-XL with the task heads that PyTorch has, sharded like BERT."""
    register(
        "xlm-roberta-xl",
        config="transformers:XLMRobertaXLConfig",
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
        card="XLM-RoBERTa with pre-norm layers and 3.5 billion parameters (Goyal et al., 2021).",
        citation=CITATION,
    )
