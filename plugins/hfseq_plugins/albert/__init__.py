"""ALBERT (Lan et al., 2019, https://arxiv.org/abs/1909.11942)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.albert.modeling"
CITATION = """\
@inproceedings{lan2020albert,
  title = {{ALBERT}: A Lite {BERT} for Self-supervised Learning of Language Representations},
  author = {Lan, Zhenzhong and Chen, Mingda and Goodman, Sebastian and Gimpel, Kevin and
            Sharma, Piyush and Soricut, Radu},
  booktitle = {International Conference on Learning Representations},
  year = {2020},
  url = {https://arxiv.org/abs/1909.11942}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ALBERT with the task heads that Transformers 4 had in Flax."""
    register(
        "albert",
        config="transformers:AlbertConfig",
        heads={
            "Model": f"{MODELING}:FlaxAlbertModel",
            "ForPreTraining": f"{MODELING}:FlaxAlbertForPreTraining",
            "ForMaskedLM": f"{MODELING}:FlaxAlbertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxAlbertForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxAlbertForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxAlbertForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxAlbertForMultipleChoice",
        },
        sharding="hfseq_plugins.albert.sharding:RULES",
        card="A Transformer encoder whose layers share their parameters (Lan et al., 2019).",
        citation=CITATION,
    )
