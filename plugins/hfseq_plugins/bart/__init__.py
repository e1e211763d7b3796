"""BART (Lewis et al., 2019, https://arxiv.org/abs/1910.13461)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.bart.modeling"
CITATION = """\
@inproceedings{lewis2020bart,
  title = {{BART}: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation,
           Translation, and Comprehension},
  author = {Lewis, Mike and Liu, Yinhan and Goyal, Naman and Ghazvininejad, Marjan and
            Mohamed, Abdelrahman and Levy, Omer and Stoyanov, Veselin and Zettlemoyer, Luke},
  booktitle = {Proceedings of ACL},
  year = {2020},
  url = {https://arxiv.org/abs/1910.13461}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers BART with the task heads that Transformers 4 had in Flax."""
    register(
        "bart",
        config="transformers:BartConfig",
        heads={
            "Model": f"{MODELING}:FlaxBartModel",
            "ForPreTraining": f"{MODELING}:FlaxBartForConditionalGeneration",
            "ForMaskedLM": f"{MODELING}:FlaxBartForConditionalGeneration",
            "ForSeq2SeqLM": f"{MODELING}:FlaxBartForConditionalGeneration",
            "ForCausalLM": f"{MODELING}:FlaxBartForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxBartForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxBartForQuestionAnswering",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A Transformer encoder-decoder trained to denoise text (Lewis et al., 2020).",
        citation=CITATION,
    )
