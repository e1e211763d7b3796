"""DeBERTa-v2 and DeBERTa-v3 (He et al., 2021, https://arxiv.org/abs/2006.03654)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.deberta_v2.modeling"
CITATION = """\
@inproceedings{he2021deberta,
  title = {{DeBERTa}: Decoding-enhanced {BERT} with Disentangled Attention},
  author = {He, Pengcheng and Liu, Xiaodong and Gao, Jianfeng and Chen, Weizhu},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
  url = {https://arxiv.org/abs/2006.03654}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers DeBERTa-v2, which is also the model type of DeBERTa-v3 and mDeBERTa."""
    register(
        "deberta-v2",
        config="transformers:DebertaV2Config",
        heads={
            "Model": f"{MODELING}:FlaxDebertaV2Model",
            "ForPreTraining": f"{MODELING}:FlaxDebertaV2ForMaskedLM",
            "ForMaskedLM": f"{MODELING}:FlaxDebertaV2ForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxDebertaV2ForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxDebertaV2ForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxDebertaV2ForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxDebertaV2ForQuestionAnswering",
        },
        sharding=f"{MODELING}:RULES",
        card="BERT with disentangled attention to contents and positions (He et al., 2021).",
        citation=CITATION,
    )
