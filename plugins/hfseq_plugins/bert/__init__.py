"""BERT (Devlin et al., 2018, https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.bert.modeling"
CITATION = """\
@inproceedings{devlin2019bert,
  title = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019},
  url = {https://arxiv.org/abs/1810.04805}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers BERT with the task heads that Transformers 4 had in Flax."""
    register(
        "bert",
        config="transformers:BertConfig",
        heads={
            "Model": f"{MODELING}:FlaxBertModel",
            "ForPreTraining": f"{MODELING}:FlaxBertForPreTraining",
            "ForMaskedLM": f"{MODELING}:FlaxBertForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxBertForCausalLM",
            "ForNextSentencePrediction": f"{MODELING}:FlaxBertForNextSentencePrediction",
            "ForSequenceClassification": f"{MODELING}:FlaxBertForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxBertForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxBertForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxBertForQuestionAnswering",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
        card="A bidirectional Transformer encoder (Devlin et al., 2019).",
        citation=CITATION,
    )
