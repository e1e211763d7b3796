"""RoBERTa (Liu et al., 2019, https://arxiv.org/abs/1907.11692)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.roberta.modeling"
CITATION = """\
@article{liu2019roberta,
  title = {{RoBERTa}: A Robustly Optimized {BERT} Pretraining Approach},
  author = {Liu, Yinhan and Ott, Myle and Goyal, Naman and Du, Jingfei and Joshi, Mandar and
            Chen, Danqi and Levy, Omer and Lewis, Mike and Zettlemoyer, Luke and Stoyanov, Veselin},
  journal = {arXiv:1907.11692},
  year = {2019},
  url = {https://arxiv.org/abs/1907.11692}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers RoBERTa with the Flax task heads of Transformers 4, sharded like BERT."""
    register(
        "roberta",
        config="transformers:RobertaConfig",
        heads={
            "Model": f"{MODELING}:FlaxRobertaModel",
            "ForPreTraining": f"{MODELING}:FlaxRobertaForMaskedLM",
            "ForMaskedLM": f"{MODELING}:FlaxRobertaForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxRobertaForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxRobertaForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxRobertaForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxRobertaForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxRobertaForQuestionAnswering",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
        card="A BERT encoder, trained with masked language modeling only (Liu et al., 2019).",
        citation=CITATION,
    )
