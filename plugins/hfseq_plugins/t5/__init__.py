"""T5 and T5 v1.1 (Raffel et al., 2020, https://arxiv.org/abs/1910.10683)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.t5.modeling"
CITATION = """\
@article{raffel2020exploring,
  title = {Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer},
  author = {Raffel, Colin and Shazeer, Noam and Roberts, Adam and Lee, Katherine and Narang, Sharan
            and Matena, Michael and Zhou, Yanqi and Li, Wei and Liu, Peter J.},
  journal = {Journal of Machine Learning Research},
  volume = {21},
  year = {2020},
  url = {https://arxiv.org/abs/1910.10683}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers T5 with the task heads that Transformers 4 had in Flax."""
    register(
        "t5",
        config="transformers:T5Config",
        heads={
            "Model": f"{MODELING}:FlaxT5Model",
            "ForPreTraining": f"{MODELING}:FlaxT5ForConditionalGeneration",
            "ForSeq2SeqLM": f"{MODELING}:FlaxT5ForConditionalGeneration",
        },
        sharding="hfseq_plugins.t5.sharding:RULES",
        card="A Transformer encoder-decoder with relative positions (Raffel et al., 2020).",
        citation=CITATION,
    )
