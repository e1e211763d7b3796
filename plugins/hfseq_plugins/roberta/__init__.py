"""RoBERTa (Liu et al., 2019, https://arxiv.org/abs/1907.11692)."""

from __future__ import annotations

from hfseq import hookimpl

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
def register_architectures(register):
    """Add RoBERTa with the heads that Transformers 4 had in Flax; it shards as BERT does."""
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
        card="BERT's encoder, trained on masks alone (Liu et al., 2019).",
        citation=CITATION,
    )
