"""HuBERT (Hsu et al., 2021, https://arxiv.org/abs/2106.07447): wav2vec 2.0 without a quantizer."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.hubert.modeling"
CITATION = """\
@article{hsu2021hubert,
  title = {{HuBERT}: Self-Supervised Speech Representation Learning by Masked Prediction of Hidden
           Units},
  author = {Hsu, Wei-Ning and Bolte, Benjamin and Tsai, Yao-Hung Hubert and Lakhotia, Kushal and
            Salakhutdinov, Ruslan and Mohamed, Abdelrahman},
  journal = {IEEE/ACM Transactions on Audio, Speech, and Language Processing},
  year = {2021},
  url = {https://arxiv.org/abs/2106.07447}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers HuBERT with the task heads that Transformers has in PyTorch."""
    register(
        "hubert",
        config="transformers:HubertConfig",
        heads={
            "Model": f"{MODELING}:FlaxHubertModel",
            "ForCTC": f"{MODELING}:FlaxHubertForCTC",
            "SequenceClassification": f"{MODELING}:FlaxHubertForSequenceClassification",
        },
        sharding="hfseq_plugins.hubert.modeling:RULES",
        card="A Transformer encoder of speech, pretrained with hidden units (Hsu et al., 2021).",
        citation=CITATION,
    )
