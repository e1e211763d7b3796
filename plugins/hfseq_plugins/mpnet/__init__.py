"""MPNet (Song et al., 2020, https://arxiv.org/abs/2004.09297)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mpnet.modeling"
CITATION = """\
@inproceedings{song2020mpnet,
  title = {{MPNet}: Masked and Permuted Pre-training for Language Understanding},
  author = {Song, Kaitao and Tan, Xu and Qin, Tao and Lu, Jianfeng and Liu, Tie-Yan},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020},
  url = {https://arxiv.org/abs/2004.09297}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers MPNet with the task heads that PyTorch has."""
    register(
        "mpnet",
        config="transformers:MPNetConfig",
        heads={
            "Model": f"{MODELING}:FlaxMPNetModel",
            "ForPreTraining": f"{MODELING}:FlaxMPNetForMaskedLM",
            "ForMaskedLM": f"{MODELING}:FlaxMPNetForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMPNetForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxMPNetForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxMPNetForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxMPNetForQuestionAnswering",
        },
        sharding=f"{MODELING}:RULES",
        card="BERT with relative positions (Song et al., 2020).",
        citation=CITATION,
    )
