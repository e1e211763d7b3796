"""CamemBERT (Martin et al., 2020, https://arxiv.org/abs/1911.03894)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.camembert.modeling:FlaxCamembert"
CITATION = """\
@inproceedings{martin2020camembert,
  title = {{CamemBERT}: a Tasty {French} Language Model},
  author = {Martin, Louis and Muller, Benjamin and Ortiz Su{\\'a}rez, Pedro Javier and
            Dupont, Yoann and Romary, Laurent and de la Clergerie, {\\'E}ric and
            Seddah, Djam{\\'e} and Sagot, Beno{\\^i}t},
  booktitle = {Proceedings of ACL},
  year = {2020},
  url = {https://arxiv.org/abs/1911.03894}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers CamemBERT with the task heads that PyTorch has, sharded like BERT."""
    register(
        "camembert",
        config="transformers:CamembertConfig",
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
        card="RoBERTa for French (Martin et al., 2020).",
        citation=CITATION,
    )
