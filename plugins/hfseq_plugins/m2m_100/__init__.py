"""M2M100 (Fan et al., 2021, https://arxiv.org/abs/2010.11125), the architecture of NLLB-200."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.m2m_100.modeling"
CITATION = """\
@article{fan2021beyond,
  title = {Beyond {English}-Centric Multilingual Machine Translation},
  author = {Fan, Angela and Bhosale, Shruti and Schwenk, Holger and Ma, Zhiyi and others},
  journal = {Journal of Machine Learning Research},
  year = {2021},
  url = {https://arxiv.org/abs/2010.11125}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers M2M100 with the task heads that Transformers has in PyTorch."""
    register(
        "m2m_100",
        config="transformers:M2M100Config",
        heads={
            "Model": f"{MODELING}:FlaxM2M100Model",
            "ForSeq2SeqLM": f"{MODELING}:FlaxM2M100ForConditionalGeneration",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A multilingual translation model, a pre-norm BART (Fan et al., 2021).",
        citation=CITATION,
    )
