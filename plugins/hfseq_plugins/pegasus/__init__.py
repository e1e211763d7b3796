"""PEGASUS (Zhang et al., 2019, https://arxiv.org/abs/1912.08777)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.pegasus.modeling"
CITATION = """\
@inproceedings{zhang2020pegasus,
  title = {{PEGASUS}: Pre-training with Extracted Gap-sentences for Abstractive Summarization},
  author = {Zhang, Jingqing and Zhao, Yao and Saleh, Mohammad and Liu, Peter J.},
  booktitle = {Proceedings of ICML},
  year = {2020},
  url = {https://arxiv.org/abs/1912.08777}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers PEGASUS with the task heads that Transformers 4 had in Flax."""
    register(
        "pegasus",
        config="transformers:PegasusConfig",
        heads={
            "Model": f"{MODELING}:FlaxPegasusModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxPegasusForConditionalGeneration",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A pre-norm Transformer encoder-decoder (Zhang et al., 2020).",
        citation=CITATION,
    )
