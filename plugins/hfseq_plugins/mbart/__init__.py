"""mBART (Liu et al., 2020, https://arxiv.org/abs/2001.08210)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mbart.modeling"
CITATION = """\
@article{liu2020multilingual,
  title = {Multilingual Denoising Pre-training for Neural Machine Translation},
  author = {Liu, Yinhan and Gu, Jiatao and Goyal, Naman and Li, Xian and Edunov, Sergey and
            Ghazvininejad, Marjan and Lewis, Mike and Zettlemoyer, Luke},
  journal = {Transactions of the Association for Computational Linguistics},
  volume = {8},
  year = {2020},
  url = {https://arxiv.org/abs/2001.08210}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers mBART with the Flax task heads of Transformers 4, sharded like BART."""
    register(
        "mbart",
        config="transformers:MBartConfig",
        heads={
            "Model": f"{MODELING}:FlaxMBartModel",
            "ForPreTraining": f"{MODELING}:FlaxMBartForConditionalGeneration",
            "ForMaskedLM": f"{MODELING}:FlaxMBartForConditionalGeneration",
            "ForSeq2SeqLM": f"{MODELING}:FlaxMBartForConditionalGeneration",
            "ForSequenceClassification": f"{MODELING}:FlaxMBartForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxMBartForQuestionAnswering",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A multilingual, pre-norm BART (Liu et al., 2020).",
        citation=CITATION,
    )
