"""mBART (Liu et al., 2020, https://arxiv.org/abs/2001.08210)."""

from __future__ import annotations

from hfseq import hookimpl

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
def register_architectures(register):
    """Add mBART with the heads that Transformers 4 had in Flax; it shards as BART does."""
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
        card="BART with the norms before the blocks, for many languages (Liu et al., 2020).",
        citation=CITATION,
    )
