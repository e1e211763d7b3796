"""XLM-RoBERTa (Conneau et al., 2020, https://arxiv.org/abs/1911.02116)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.xlm_roberta.modeling"
CITATION = """\
@inproceedings{conneau2020unsupervised,
  title = {Unsupervised Cross-lingual Representation Learning at Scale},
  author = {Conneau, Alexis and Khandelwal, Kartikay and Goyal, Naman and Chaudhary, Vishrav and
            Wenzek, Guillaume and Guzm{\\'a}n, Francisco and Grave, Edouard and Ott, Myle and
            Zettlemoyer, Luke and Stoyanov, Veselin},
  booktitle = {Proceedings of ACL},
  year = {2020},
  url = {https://arxiv.org/abs/1911.02116}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers XLM-RoBERTa with the Flax task heads of Transformers 4, sharded like BERT."""
    register(
        "xlm-roberta",
        config="transformers:XLMRobertaConfig",
        heads={
            "Model": f"{MODELING}:FlaxXLMRobertaModel",
            "ForPreTraining": f"{MODELING}:FlaxXLMRobertaForMaskedLM",
            "ForMaskedLM": f"{MODELING}:FlaxXLMRobertaForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxXLMRobertaForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxXLMRobertaForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxXLMRobertaForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxXLMRobertaForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxXLMRobertaForQuestionAnswering",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
        card="RoBERTa for a hundred languages (Conneau et al., 2020).",
        citation=CITATION,
    )
