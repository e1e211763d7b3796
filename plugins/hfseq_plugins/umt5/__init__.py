"""UMT5 (Chung et al., 2023, https://arxiv.org/abs/2304.09151)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.umt5.modeling:FlaxUMT5"
CITATION = """\
@inproceedings{chung2023unimax,
  title = {{UniMax}: Fairer and More Effective Language Sampling for Large-Scale Multilingual
           Pretraining},
  author = {Chung, Hyung Won and Constant, Noah and Garcia, Xavier and Roberts, Adam and Tay, Yi
            and Narang, Sharan and Firat, Orhan},
  booktitle = {Proceedings of ICLR},
  year = {2023},
  url = {https://arxiv.org/abs/2304.09151}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers UMT5 with the task heads that PyTorch has, sharded like T5."""
    register(
        "umt5",
        config="transformers:UMT5Config",
        heads={
            "Model": f"{CLASS}Model",
            "ForSeq2SeqLM": f"{CLASS}ForConditionalGeneration",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
            "ForTokenClassification": f"{CLASS}ForTokenClassification",
            "ForQuestionAnswering": f"{CLASS}ForQuestionAnswering",
            "EncoderModel": f"{CLASS}EncoderModel",
        },
        sharding="hfseq_plugins.umt5.modeling:RULES",
        card="T5 v1.1 for a hundred languages with a bias in each layer (Chung et al., 2023).",
        citation=CITATION,
    )
