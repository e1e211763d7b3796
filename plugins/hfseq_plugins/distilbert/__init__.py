"""DistilBERT (Sanh et al., 2019, https://arxiv.org/abs/1910.01108)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.distilbert.modeling"
CITATION = """\
@misc{sanh2019distilbert,
  title = {{DistilBERT}, a distilled version of {BERT}: smaller, faster, cheaper and lighter},
  author = {Sanh, Victor and Debut, Lysandre and Chaumond, Julien and Wolf, Thomas},
  year = {2019},
  url = {https://arxiv.org/abs/1910.01108}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers DistilBERT with the task heads that Transformers 4 had in Flax."""
    register(
        "distilbert",
        config="transformers:DistilBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxDistilBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxDistilBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxDistilBertForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxDistilBertForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxDistilBertForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxDistilBertForMultipleChoice",
        },
        sharding="hfseq_plugins.distilbert.sharding:RULES",
        card="A Transformer encoder, half as deep as BERT (Sanh et al., 2019).",
        citation=CITATION,
    )
